"""What a store says of itself, and stores that come and go."""

from __future__ import annotations

import gc

import mxnet as mx
import pytest

KINDS = {
    "dist_sync_p3": "dist_sync_p3",
    "dist_device_sync_p3": "dist_device_sync_p3",
    "dist_async_p3": "dist_async_p3",
    "dist_p3": "dist_sync_p3",
    "p3": "dist_sync_p3",
}


def what_stores_say():
    return {name: (s.type, s.rank, s.num_workers) for name in KINDS for s in [mx.kv.create(name)]}


def test_type_rank_and_workers_are_known_before_anything_is_done(pair):
    expected = [{name: (kind, rank, 2) for name, kind in KINDS.items()} for rank in (0, 1)]
    assert pair.run(what_stores_say) == expected


def test_they_are_in_a_process_without_a_launcher(alone):
    assert alone(what_stores_say) == {name: (kind, 0, 1) for name, kind in KINDS.items()}


def create_and_delete(how_many, wait):
    """Every store is given a key and a round, and deleted with or without waiting for it."""
    outs = []
    for number in range(how_many):
        kv = mx.kv.create(list(KINDS)[number % 2])
        out = mx.nd.full((20,), number)
        kv.broadcast("w", out, out=out)
        kv.pushpull("w", mx.nd.ones((20,)), out=out)
        if wait:
            out.wait_to_read()
        del kv
        gc.collect()
        outs.append(out)
    return [out.asnumpy().tolist() for out in outs]


@pytest.mark.parametrize("wait", [True, False])
def test_stores_are_deleted_and_made_again(pair, wait):
    assert pair.run(create_and_delete, 10, wait) == [[[2.0] * 20] * 10] * 2


def two_kinds_side_by_side():
    """A synchronous store with an optimizer beside one without, by turns and on the same key."""
    first, second = mx.kv.create("dist_sync_p3"), mx.kv.create("dist_device_sync_p3")
    first.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    weight, total = mx.nd.zeros((20,)), mx.nd.zeros((20,))
    first.broadcast(3, weight, out=weight)
    second.broadcast(3, total, out=total)
    for _ in range(3):
        first.pushpull(3, mx.nd.ones((20,)), out=weight)
        second.pushpull(3, mx.nd.full((20,), 5), out=total)
    del first
    second.pushpull(3, mx.nd.full((20,), 7), out=total)
    return weight.asnumpy().tolist(), total.asnumpy().tolist()


def test_two_stores_keep_keys_and_optimizers_apart(pair):
    assert pair.run(two_kinds_side_by_side) == [([-6.0] * 20, [14.0] * 20)] * 2
