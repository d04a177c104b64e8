"""Asynchronous stores: every push counts once, pulls are of one update, nobody waits."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from .gate import behind_gate

STORE = "dist_async_p3"
SIZE = 50  # seven slices
PUSHES = 5


def push_and_look():
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    weight, seen = mx.nd.zeros((SIZE,)), []
    kv.broadcast("w", weight, out=weight)
    kv.barrier()
    for _ in range(PUSHES):
        updated, pulled = mx.nd.zeros((SIZE,)), mx.nd.zeros((SIZE,))
        kv.pushpull("w", mx.nd.ones((SIZE,)), out=updated)
        kv.pull("w", out=pulled)
        seen += [updated, pulled]
    mx.nd.waitall()
    kv.barrier()
    kv.pull("w", out=weight)
    return weight.asnumpy(), [array.asnumpy() for array in seen]


@pytest.mark.parametrize("job", ["pair", "trio", "naive"])
def test_every_push_counts_once_and_no_pull_mixes_two_updates(job, request):
    cluster = request.getfixturevalue(job)
    results = cluster.run(push_and_look)
    for final, seen in results:
        assert (final == -PUSHES * len(results)).all()
        for array in seen:
            assert (array == array[0]).all()
        values = [array[0] for array in seen]
        assert values == sorted(values, reverse=True)  # nobody sees an older value again


def one_rank_is_slow():
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    weight = mx.nd.zeros((SIZE,))
    kv.broadcast("w", weight, out=weight)
    weight.wait_to_read()
    kv.barrier()
    if kv.rank == 0:
        for _ in range(20):
            kv.pushpull("w", mx.nd.ones((SIZE,)), out=weight)
        seen = float(weight.asnumpy()[0])
        kv.barrier()
        return seen
    gate, late = behind_gate(mx.nd.ones((SIZE,)))
    kv.pushpull("w", late, out=weight)
    kv.barrier()  # rank 0 has done all its rounds
    gate.set()
    return float(weight.asnumpy()[0])


def test_a_slow_worker_holds_nobody_up(pair):
    fast, slow = pair.run(one_rank_is_slow)
    assert fast == -20
    assert slow == -21


def momentum_of_all():
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    weight = mx.nd.zeros((SIZE,))
    kv.broadcast("w", weight, out=weight)
    for turn in range(4):
        kv.barrier()
        if turn % 2 == kv.rank:
            kv.pushpull("w", mx.nd.ones((SIZE,)), out=weight)
            weight.wait_to_read()
    kv.barrier()
    kv.pull("w", out=weight)
    return weight.asnumpy()


def test_updates_of_all_ranks_share_their_states(pair):
    weight, momentum = 0.0, 0.0
    for _ in range(4):
        momentum = 0.5 * momentum - 1
        weight += momentum
    for ours in pair.run(momentum_of_all):
        np.testing.assert_array_equal(ours, np.full(SIZE, weight, np.float32))
