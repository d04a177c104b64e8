"""What a push tells the servers, and what a server makes of it, without processes."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from p3 import optimizers
from p3.optimizers import Changes
from p3.rounds import Push
from p3.server.shard import Unit
from p3.server.updater import Updater
from p3.slicing import KeyEntry
from p3.wire import PUSH, Record


def told(changes: Changes, key: Any) -> dict[str, Any]:
    text = changes.since_last_push(key)
    return json.loads(text) if text else {}


class Key:
    """The first slice, of eight elements, of a key on a server; pushes of its elements."""

    def __init__(self, updater: Updater, name: str, size: int = 3) -> None:
        entry = KeyEntry(hash(name) % 1000, 1, name, (size,), "float32", "sync", False, 0)
        self.unit = Unit(entry, entry.slices(8, 1)[:1], 1)
        self.name, self._updater = name, updater

    def push(self, extra: bytes, step: int, rank: int = 0) -> list[float]:
        """Apply a gradient of ones; the value after it."""
        record = Record(self.unit.entry.id, 0, step, step, 0, PUSH)
        part = np.ones(len(self.unit.value), np.float32)
        self._updater.apply(self.unit, [Push(rank, [record], [part], extra)])
        return self.unit.value.tolist()


# ---- what is told


def test_a_push_tells_what_changed_since_the_keys_last_one_and_nothing_else() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    changes = Changes(optimizer)
    first = {"rescale_grad": 1.0, "lr": 0.5, "multipliers": [1.0, 1.0]}
    assert told(changes, "a") == told(changes, "b") == first
    assert told(changes, "a") == {}
    optimizer.wd = 0.25
    assert told(changes, "a") == {"wd": 0.25}
    optimizer.lr = 0.125
    assert told(changes, "a") == {"lr": 0.125}
    assert told(changes, "b") == {"wd": 0.25, "lr": 0.125}
    optimizer.wd = 0.5
    optimizer.wd = 0.25  # another object of the same value
    assert told(changes, "a") == told(changes, "b") == {}
    optimizer.set_lr_mult({"b": 2.0})
    assert told(changes, "a") == {}
    assert told(changes, "b") == {"multipliers": [2.0, 1.0]}


def test_nadams_product_follows_the_order_of_the_pushes() -> None:
    optimizer = mx.optimizer.Nadam(learning_rate=0.5)
    changes, reference = Changes(optimizer), mx.optimizer.Nadam(learning_rate=0.5)
    update = mx.optimizer.get_updater(reference)
    for key in ["a", "b", "c", "a", "b", "c", "b"]:
        assert told(changes, key)["m_schedule"] == reference.m_schedule
        update(key, mx.nd.ones((1,)), mx.nd.ones((1,)))
    assert optimizer.m_schedule == 1.0
    assert changes.as_applied().m_schedule == reference.m_schedule


def test_the_optimizer_as_it_were_had_it_been_applied_here() -> None:
    def make() -> Any:
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=1.0)
        return mx.optimizer.Adam(learning_rate=1.0, lr_scheduler=schedule)

    optimizer, reference = make(), make()
    changes, update = Changes(optimizer), mx.optimizer.get_updater(reference)
    for key in ["a", "b"] * 5 + ["b"]:
        changes.since_last_push(key)
        update(key, mx.nd.ones((1,)), mx.nd.ones((1,)))
    found = changes.as_applied()
    assert found.num_update == reference.num_update == 6
    assert found._index_update_count == reference._index_update_count == {"a": 5, "b": 6}
    assert found.learning_rate == reference.learning_rate == 0.25
    assert vars(found.lr_scheduler) == vars(reference.lr_scheduler)
    assert (optimizer.num_update, optimizer.lr_scheduler.base_lr) == (0, 1.0)


def test_following_another_object_of_the_same_optimizer() -> None:
    first, second = (mx.optimizer.SGD(learning_rate=0.5, rescale_grad=r) for r in (1.0, 0.5))
    changes = Changes(first)
    told(changes, "a")
    changes.follow(second)
    assert told(changes, "a") == {"rescale_grad": 0.5}
    second.wd = 0.25
    assert told(changes, "a") == {"wd": 0.25}


def test_telling_nothing_costs_little_whatever_the_number_of_keys() -> None:
    optimizer = mx.optimizer.SGD(
        learning_rate=0.5, param_idx2name={key: f"layer{key}_weight" for key in range(2000)}
    )
    changes = Changes(optimizer)

    def seconds() -> float:
        began = time.perf_counter()
        for key in range(2000):
            changes.since_last_push(key)
        return time.perf_counter() - began

    seconds()
    assert min(seconds() for _ in range(5)) / 2000 < 40e-6  # 4e-6 on a quiet machine


# ---- what a server makes of it


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_change_holds_for_the_push_it_came_with_however_far_other_keys_are(kind: str) -> None:
    def make() -> Any:
        schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
        return mx.optimizer.create(kind, learning_rate=1.0, lr_scheduler=schedule, wd=0.5)

    optimizer = make()
    changes, updater = Changes(optimizer), Updater(optimizers.dump(optimizer), ())
    texts: dict[str, list[bytes]] = {"a": [], "b": []}
    wanted: dict[str, list[list[float]]] = {"a": [], "b": []}
    local = make()
    update = mx.optimizer.get_updater(local)
    weights = {key: mx.nd.zeros((3,)) for key in texts}
    for step in range(4):
        optimizer.wd = local.wd = 0.5 * step
        for key, weight in weights.items():
            texts[key].append(changes.since_last_push(key))
            update(key, mx.nd.ones((3,)), weight)
            wanted[key].append(weight.asnumpy().tolist())
    a, b = Key(updater, "a"), Key(updater, "b")
    assert [a.push(text, step) for step, text in enumerate(texts["a"], 1)] == wanted["a"]
    assert [b.push(text, step) for step, text in enumerate(texts["b"], 1)] == wanted["b"]


def test_an_asynchronous_rank_is_updated_by_what_it_said_itself() -> None:
    optimizers_by_rank = [mx.optimizer.SGD(learning_rate=1.0) for _ in range(2)]
    changes = [Changes(optimizer) for optimizer in optimizers_by_rank]
    key = Key(Updater(optimizers.dump(optimizers_by_rank[0]), ()), "a", 1)
    assert key.push(changes[0].since_last_push("a"), 1, 0) == [-1.0]
    optimizers_by_rank[1].set_learning_rate(0.5)
    assert key.push(changes[1].since_last_push("a"), 1, 1) == [-1.5]
    assert key.push(changes[0].since_last_push("a"), 2, 0) == [-2.5]


def test_momentum_that_is_set_after_the_start_is_refused_as_by_mxnet() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=1.0)
    changes, key = Changes(optimizer), None
    key = Key(Updater(optimizers.dump(optimizer), ()), "a")
    key.push(changes.since_last_push("a"), 1)
    optimizer.momentum = 0.5
    with pytest.raises(ValueError, match="momentum was 0"):
        key.push(changes.since_last_push("a"), 2)


def test_the_names_of_element_wise_optimizers_are_mxnets() -> None:
    registered = {kind.__name__ for kind in mx.optimizer.Optimizer.opt_registry.values()}
    assert registered >= optimizers.ELEMENTWISE


def test_states_from_a_file_leave_counts_and_what_was_told() -> None:
    def make() -> Any:
        return mx.optimizer.Adam(learning_rate=0.5, wd=0.25)

    optimizer, local = make(), make()
    optimizer.lr_mult["a"] = local.lr_mult["a"] = 0.5
    changes = Changes(optimizer)
    updater, update = Updater(optimizers.dump(make()), ()), mx.optimizer.get_updater(local)
    key, weight = Key(updater, "a", 20), mx.nd.zeros((8,))  # a slice of the key
    moments = (np.full(20, 0.25, np.float32), np.full(20, 0.5, np.float32))
    for step in range(1, 6):
        if step == 4:
            updater.set_states(pickle.dumps(({"a": moments}, None)))
            update.states["a"] = tuple(mx.nd.array(moment[:8]) for moment in moments)
        found = key.push(changes.since_last_push("a"), step)
        update("a", mx.nd.ones((8,)), weight)
        assert found == weight.asnumpy().tolist(), f"step {step}"
