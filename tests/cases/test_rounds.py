"""Rounds: which pushes are summed, which value a pull gives, and when memory is free."""

from __future__ import annotations

import random
import signal
import threading
import time

import mxnet as mx
import numpy as np
import pytest

from .gate import behind_gate

STORE = "dist_sync_p3"


def full(value, shape=(20,)):
    return mx.nd.full(shape, value)


# ---- a rank that is ahead


def push_twice_before_the_other():
    kv = mx.kv.create(STORE)
    kv.init("w", full(0))
    first, second = full(-1), full(-1)
    if kv.rank == 1:
        kv.barrier()
    base = 100**kv.rank
    kv.pushpull("w", full(base), out=first)
    kv.pushpull("w", full(10 * base), out=second)
    if kv.rank == 0:
        kv.barrier()
    return first.asnumpy(), second.asnumpy()


def test_a_second_push_of_a_rank_waits_for_the_next_round(pair):
    for first, second in pair.run(push_twice_before_the_other):
        assert (first == 101).all()
        assert (second == 1010).all()


# ---- many rounds, in another order on every rank


def sizes():
    """30 keys of 1 to 50 elements."""
    return {key: 1 + (7 * key) % 50 for key in range(30)}


def many_rounds(rounds, seed):
    """SGD that adds the pushes' sum: whole numbers, so every version has its own exact value."""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=-1.0))
    chance = random.Random(f"{seed} {kv.rank}")
    for key, size in sizes().items():
        kv.init(key, full(key + 1000 * kv.rank, (size,)))
    pulled = {}
    for number in range(1, rounds + 1):
        keys = list(sizes())
        chance.shuffle(keys)
        for key in keys:
            pulled[number, key] = mx.nd.empty((sizes()[key],))
            gradient = full(number * (kv.rank + 1) + key, (sizes()[key],))
            kv.pushpull(key, gradient, out=pulled[number, key], priority=-key)
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.01)
    return {place: array.asnumpy() for place, array in pulled.items()}


class Hiccups:
    """Stops the servers by turns for random moments, each at other times."""

    def __init__(self, cluster, names, seed):
        self._cluster, self._names, self._chance = cluster, names, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        while not self._over.wait(self._chance.random() * 0.05):
            name = self._chance.choice(self._names)
            self._cluster.send_signal(name, signal.SIGSTOP)
            self._over.wait(self._chance.random() * 0.02)
            self._cluster.send_signal(name, signal.SIGCONT)


def test_every_value_of_many_rounds_is_that_of_one_version(pair):
    with Hiccups(pair, ["server 0", "server 1"], seed=1):
        results = pair.run(many_rounds, 200, 1)
    for number, key in results[0]:
        ranks = 1 + 2
        expected = key + ranks * number * (number + 1) / 2 + 2 * key * number
        for result in results:
            assert (result[number, key] == expected).all(), (number, key)


def first_values(seed):
    """What each rank finds in fresh keys, and the first sum, however late a rank is."""
    kv = mx.kv.create(STORE)
    chance = random.Random(f"{seed} {kv.rank}")
    found = []
    for key in range(30):
        time.sleep(chance.random() * 0.01)
        value, total = full(-1), full(-1)
        kv.broadcast(key, full(kv.rank + 5), out=value)
        kv.pushpull(key, full(kv.rank + 1), out=total)
        found.append((value, total))
    return [(value.asnumpy(), total.asnumpy()) for value, total in found]


def test_the_first_value_is_that_of_rank_0_and_never_a_sum(pair):
    for result in pair.run(first_values, 2):
        for value, total in result:
            assert (value == 5).all()
            assert (total == 3).all()


# ---- memory


def push_and_overwrite():
    """A megabyte a push; the array is written over and forgotten at once."""
    kv = mx.kv.create(STORE)
    shape, sums = (512, 512), []
    kv.init("w", mx.nd.zeros(shape))
    for number in range(20):
        gradient = full(number + kv.rank, shape)
        total = mx.nd.empty(shape)
        kv.push("w", gradient)
        gradient[:] = 999
        kv.pull("w", out=total)
        del gradient
        sums.append(total)
    return [(total.min().asscalar(), total.max().asscalar()) for total in sums]


def test_a_pushed_array_may_be_overwritten_and_deleted_at_once(default_slices):
    for result in default_slices.run(push_and_overwrite):
        assert result == [(2 * n + 1, 2 * n + 1) for n in range(20)]


def push_what_is_not_ready():
    """The calls return while the gradient is still being computed, or nobody opens the gate."""
    kv = mx.kv.create(STORE)
    total = mx.nd.zeros((20,))
    kv.init("w", total)
    gate, gradient = behind_gate(full(kv.rank + 1))
    kv.push("w", gradient)
    gradient[:] = 999
    kv.pull("w", out=total)
    gate.set()
    return total.asnumpy()


def test_an_array_that_is_still_being_computed_may_be_pushed(pair):
    for total in pair.run(push_what_is_not_ready):
        assert (total == 3).all()


# ---- what follows a pull


def use_at_once():
    """Read, add to and overwrite what is pulled, without waiting for it."""
    kv = mx.kv.create(STORE)
    kv.init("w", full(7))
    pulled, zeroed, alone = full(-1), full(-1), full(-1)
    kv.pull("w", out=pulled)
    plus_one = pulled + 1
    kv.pull("w", out=zeroed)
    zeroed[:] = 0
    kv.push("w", full(kv.rank))
    kv.pull("w", out=alone)
    alone += 1
    return [array.asnumpy() for array in (pulled, plus_one, zeroed, alone)]


@pytest.mark.parametrize("job", ["pair", "naive"])
def test_a_pulled_array_may_be_used_and_overwritten_without_a_wait(job, request):
    for pulled, plus_one, zeroed, alone in request.getfixturevalue(job).run(use_at_once):
        assert (pulled == 7).all()
        assert (plus_one == 8).all()
        assert (zeroed == 0).all()
        assert (alone == 2).all()


# ---- the same bits


def sum_of_large_and_small(seed):
    """In rank order float32 loses the 1: any other order of summing shows."""
    kv = mx.kv.create(STORE)
    chance = random.Random(f"{seed} {kv.rank}")
    kv.init("w", full(0))
    total, seen = mx.nd.empty((20,)), set()
    for _ in range(20):
        time.sleep(chance.random() * 0.005)
        kv.pushpull("w", full([1e8, 1, -1e8][kv.rank]), out=total)
        seen.update(total.asnumpy().tolist())
    return seen


def test_sums_are_in_rank_order_whoever_comes_first(trio):
    assert trio.run(sum_of_large_and_small, 1) == [{0.0}] * 3


def train(seed):
    """Adam on random gradients, with pauses that differ from run to run."""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.Adam())
    pauses, numbers = random.Random(f"{seed} {kv.rank}"), np.random.RandomState(kv.rank)
    weights = {key: mx.nd.zeros((10 * key + 1,)) for key in range(5)}
    time.sleep(pauses.random() * 0.2)
    for key, weight in weights.items():
        kv.init(key, weight)
    for _ in range(20):
        time.sleep(pauses.random() * 0.01)
        for key, weight in weights.items():
            gradient = mx.nd.array(numbers.standard_normal(weight.shape))
            kv.pushpull(key, gradient, out=weight)
    return [weight.asnumpy().tobytes() for weight in weights.values()]


def test_two_runs_are_equal_bit_for_bit(trio):
    first, second = trio.run(train, 1), trio.run(train, 2)
    assert first == second
    assert first[0] == first[1] == first[2]
