"""The forward order is found from the times at which gradients become ready."""

from __future__ import annotations

import random
from typing import Any, List, Optional

from p3.forward_order import ForwardOrder, forward


def run(times: List[dict[Any, float]], names: Optional[List[Any]] = None) -> List[Any]:
    """What each step of ``times`` (key -> second it is ready) makes ``observe`` return."""
    observer = ForwardOrder()
    found = []
    for step, ready in enumerate(times, 1):
        for key in sorted(ready, key=ready.__getitem__):
            priority = -(names or sorted(ready)).index(key)
            found.append(observer.observe(key, step, priority, 100.0 * step + ready[key]))
    return [order for order in found if order is not None]


def test_lexical_names_are_put_right() -> None:
    layers = [f"conv{number}" for number in range(20)]  # by name: conv0, conv1, conv10, ...
    backward = {name: 0.01 * (20 - place) for place, name in enumerate(layers)}
    assert run([backward] * 4) == [layers]


def test_a_noisy_clock_does_not_hide_it() -> None:
    noise = random.Random(1)
    steps = [
        {key: 0.01 * (30 - key) + noise.uniform(0, 0.012) for key in range(30)} for _ in range(12)
    ]
    (order,) = run(steps)
    assert max(abs(place - key) for place, key in enumerate(order)) <= 2


def test_gradients_ready_together_keep_the_callers_order() -> None:
    together = {key: 0.0001 * key for key in range(50)}
    assert run([together] * 6) == [list(range(50))]


def test_bulks_are_reversed_and_kept_in_order_inside() -> None:
    ready = [(0.5 - 0.1 * (key // 3) + 0.0001 * key, -key, key) for key in range(9)]
    assert forward(ready) == list(range(9))


def test_nothing_is_found_while_steps_disagree() -> None:
    noise = random.Random(2)
    steps = [{key: noise.uniform(0, 1) for key in range(20)} for _ in range(20)]
    assert run(steps) == []


def test_keys_that_come_and_go_are_no_order() -> None:
    assert run([{0: 0.1, 1: 0.2}, {0: 0.1}, {0: 0.1, 1: 0.2}, {1: 0.2}, {0: 0.1}]) == []


def test_one_key_needs_no_order() -> None:
    assert run([{0: 0.1}] * 5) == []
