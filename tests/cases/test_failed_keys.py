"""A key that cannot go on: every rank is told, other keys go on, no old value remains."""

from __future__ import annotations

import contextlib

import mxnet as mx
import numpy as np
import pytest

import p3.store

SIZE = 20  # three slices


def raised(call):
    """The error that ``call`` raises, as text; fails if there is none."""
    with pytest.raises(Exception) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def settle():
    """Have MXNet raise what it still holds, such as an input's error."""
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


def uncomputable(size=SIZE):
    return mx.nd.random.normal(0, -1, (size,))  # MXNet finds out when it computes it


def one_rank_pushes_what_cannot_be_computed():
    kv = mx.kv.create("dist_sync_p3")
    bad, good = mx.nd.zeros((SIZE,)), mx.nd.zeros((SIZE,))
    for name, array in (("bad", bad), ("good", good)):
        kv.broadcast(name, mx.nd.ones((SIZE,)), out=array)
    mx.nd.waitall()
    kv.barrier()
    gradient = uncomputable() if kv.rank == 0 else mx.nd.ones((SIZE,))
    kv.pushpull("bad", gradient, out=bad)
    kv.pushpull("good", mx.nd.ones((SIZE,)), out=good)
    told = raised(bad.asnumpy)
    settle()
    kv.barrier()
    return told, raised(lambda: kv.push("bad", bad)), good.asnumpy().tolist()


def test_every_rank_hears_of_an_array_that_cannot_be_computed(pair):
    results = pair.run(one_rank_pushes_what_cannot_be_computed)
    for _, again, good in results:
        assert good == [2.0] * SIZE
        assert "rank 0" in again and "'bad'" in again and "computed" in again
    assert "rank 0" in results[1][0] and "'bad'" in results[1][0]


def rank_0_initialises_with_what_cannot_be_computed():
    kv = mx.kv.create("dist_sync_p3")
    out = mx.nd.zeros((SIZE,))
    kv.init("w", uncomputable() if kv.rank == 0 else mx.nd.ones((SIZE,)))
    told = raised(lambda: (kv.pull("w", out=out), out.asnumpy()))
    settle()
    return told


def test_a_first_value_that_cannot_be_computed(pair):
    for told in pair.run(rank_0_initialises_with_what_cannot_be_computed):
        assert "rank 0" in told and "'w'" in told


def pull_into_an_array_with_an_error():
    kv = mx.kv.create("dist_sync_p3")
    kv.init("w", mx.nd.ones((SIZE,)))
    out = uncomputable()
    kv.pull("w", out=out)
    told, fresh = raised(out.asnumpy), mx.nd.zeros((SIZE,))
    kv.pull("w", out=fresh)
    settle()
    return told, fresh.asnumpy().tolist()


def test_an_error_of_the_callers_own_array_leaves_the_key_alone(pair):
    for told, fresh in pair.run(pull_into_an_array_with_an_error):
        assert "MXNetError" in told
        assert fresh == [1.0] * SIZE


def an_operation_that_cannot_start():
    kv = mx.kv.create("dist_sync_p3")
    weight = mx.nd.zeros((SIZE,))
    kv.broadcast("w", mx.nd.ones((SIZE,)), out=weight)
    weight.wait_to_read()
    kv.barrier()
    memory = p3.store.ndarray.memory
    if kv.rank == 1:
        p3.store.ndarray.memory = None  # whoever calls it gets a TypeError
    kv.pushpull("w", mx.nd.ones((SIZE,)), out=weight)
    told = raised(weight.asnumpy)
    p3.store.ndarray.memory = memory
    return told


def test_an_operation_that_cannot_start_fails_its_key_on_all_ranks(pair):
    first, second = pair.run(an_operation_that_cannot_start)
    assert "rank 1" in first and "TypeError" in first
    assert "TypeError" in second


def the_update_raises(dtype):
    kv = mx.kv.create("dist_sync_p3")
    kv.set_optimizer(mx.optimizer.create("dcasgd", momentum=0.9))
    weight = mx.nd.zeros((SIZE,), dtype=dtype)
    kv.broadcast("w", mx.nd.ones((SIZE,), dtype=dtype), out=weight)
    before = weight.asnumpy().tolist()
    kv.pushpull("w", mx.nd.ones((SIZE,), dtype=dtype), out=weight)
    return before, raised(weight.asnumpy), weight.asnumpy()


def test_a_second_look_at_a_failed_weight_shows_no_old_value(pair):
    """MXNet raises an array's error once; a model saved after that must not look like one."""
    for before, told, second in pair.run(the_update_raises, "float32"):
        assert before == [1.0] * SIZE
        assert "'w'" in told
        assert np.isnan(second).all()
