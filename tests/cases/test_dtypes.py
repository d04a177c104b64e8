"""Dtypes: summed in their own, float16 in float32; small steps of half-precision weights."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3.errors import UsageError

STORE = "dist_sync_p3"
SIZE = 20
DTYPES = {
    "float16": 0.5,
    "float32": 0.5,
    "float64": 2.0**-40,
    "int8": 3,
    "uint8": 3,
    "int32": 3,
    "int64": 2**40 + 1,
}


def sums(value, dtype):
    kv = mx.kv.create(STORE)
    array = mx.nd.array(np.full(SIZE, value, dtype), dtype=dtype)
    out = mx.nd.zeros((SIZE,), dtype=dtype)
    kv.broadcast("w", mx.nd.ones((SIZE,), dtype=dtype), out=out)
    first = out.asnumpy()
    kv.pushpull("w", array, out=out)
    return first, out.asnumpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_made_in_the_keys_own_dtype(dtype, trio):
    value = np.array(DTYPES[dtype], dtype)
    for first, total in trio.run(sums, value, dtype):
        assert first.dtype == total.dtype == np.dtype(dtype)
        assert (first == 1).all()
        assert (total == value * 3).all()


def test_half_precision_does_not_overflow_on_the_way(trio):
    """30000 + 30000 is beyond float16; the sum with -30000 is not."""
    for _, total in trio.run(overflow):
        assert (total == 30000).all()


def overflow():
    kv = mx.kv.create(STORE)
    value = -30000 if kv.rank == 2 else 30000
    out = mx.nd.zeros((SIZE,), dtype="float16")
    kv.init("w", out)
    kv.pushpull("w", mx.nd.full((SIZE,), value, dtype="float16"), out=out)
    return None, out.asnumpy()


def mean_of_four():
    """Worker updates of several devices and ranks: the sum is rescaled before it is half again."""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=0.25, multi_precision=True))
    weight = mx.nd.zeros((SIZE,), dtype="float16")
    kv.broadcast("w", weight, out=weight)
    values = [mx.nd.full((SIZE,), 15000, mx.cpu(i), "float16") for i in range(2)]
    kv.pushpull("w", values, out=weight)
    return weight.asnumpy()


def test_large_half_precision_gradients_are_rescaled(pair):
    for weight in pair.run(mean_of_four):
        assert (weight == -15000).all()


def tiny_steps(dtype):
    kv = mx.kv.create(STORE)
    fields = {"learning_rate": 0.001, "momentum": 0.5, "multi_precision": True}
    kv.set_optimizer(mx.optimizer.SGD(**fields))
    weight = mx.nd.ones((SIZE,), dtype=dtype)
    kv.broadcast("w", weight, out=weight)
    for step in range(1000):
        gradient = mx.nd.full((SIZE,), (1 + step % 3) / 64, dtype=dtype)
        kv.pushpull("w", gradient, out=weight)
    return weight.asnumpy()


def test_a_thousand_tiny_steps_move_half_precision_weights_as_locally(single):
    fields = {"learning_rate": 0.001, "momentum": 0.5, "multi_precision": True}
    update = mx.optimizer.get_updater(mx.optimizer.SGD(**fields))
    weight = mx.nd.ones((SIZE,), dtype="float16")
    for step in range(1000):
        update(0, mx.nd.full((SIZE,), (1 + step % 3) / 64, dtype="float16"), weight)
    (ours,) = single.run(tiny_steps, "float16")
    np.testing.assert_array_equal(ours, weight.asnumpy())
    assert (ours < 1).all()


def what_cannot_be_stored():
    kv = mx.kv.create(STORE)
    with pytest.raises(UsageError, match=r"'b'.*bool"):
        kv.init("b", mx.nd.zeros((3,), dtype="bool"))
    kv.init("w", mx.nd.zeros((3,)))
    with pytest.raises(UsageError, match=r"'w'.*float32.*int32"):
        kv.push("w", mx.nd.zeros((3,), dtype="int32"))


def test_others_are_refused_on_the_caller(single):
    single.run(what_cannot_be_stored)
