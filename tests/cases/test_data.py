"""Data: every size, shape and place in memory that an array may have."""

from __future__ import annotations

import os
import resource

import mxnet as mx
import numpy as np
import pytest

from p3.testing import LocalCluster

STORE = "dist_sync_p3"
SIZES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 1001]


# ---- sizes and shapes


def every_size(sizes):
    kv = mx.kv.create(STORE)
    found = {}
    for size in sizes:
        first, total = mx.nd.empty((size,)), mx.nd.empty((size,))
        kv.init(size, mx.nd.arange(size))
        kv.pull(size, out=first)
        kv.pushpull(size, mx.nd.arange(size) * (kv.rank + 1), out=total)
        found[size] = (first, total)
    return {size: (first.asnumpy(), total.asnumpy()) for size, (first, total) in found.items()}


@pytest.mark.parametrize("job", ["single", "trio"])
def test_every_size_arrives_whole(job, request):
    results = request.getfixturevalue(job).run(every_size, SIZES)
    for found in results:
        for size, (first, total) in found.items():
            np.testing.assert_array_equal(first, np.arange(size))
            np.testing.assert_array_equal(total, np.arange(size) * sum(range(1, len(results) + 1)))


def shapes_without_elements():
    kv = mx.kv.create(STORE)
    with mx.util.np_shape(True):
        found = []
        for number, shape in enumerate([(0,), (3, 0), (), (2, 3)]):
            kv.init(number, mx.nd.ones(shape))
            pulled, total = mx.nd.zeros(shape), mx.nd.zeros(shape)
            kv.pull(number, out=pulled)
            kv.pushpull(number, mx.nd.ones(shape), out=total)
            found.append((pulled.asnumpy(), total.asnumpy()))
        return found


@pytest.mark.parametrize("job", ["single", "pair"])
def test_empty_arrays_and_scalars_are_arrays_like_others(job, request):
    results = request.getfixturevalue(job).run(shapes_without_elements)
    for found in results:
        for (pulled, total), shape in zip(found, [(0,), (3, 0), (), (2, 3)]):
            np.testing.assert_array_equal(pulled, np.ones(shape))
            np.testing.assert_array_equal(total, len(results) * np.ones(shape))


# ---- views


def views():
    """Rows, reshapes and transposes are pushed from and pulled into."""
    kv = mx.kv.create(STORE)
    kv.init("rows", mx.nd.zeros((2, 10)))
    kv.init("flat", mx.nd.zeros((40,)))
    kv.init("turned", mx.nd.zeros((10, 4)))
    source, target = mx.nd.arange(40).reshape((4, 10)) + kv.rank, mx.nd.full((4, 10), -1)
    kv.pushpull("rows", source[1:3], out=target[1:3])
    flat, turned = mx.nd.zeros((4, 10)), mx.nd.zeros((10, 4))
    kv.push("flat", source.reshape((40,)))
    kv.pull("flat", out=flat.reshape((40,)))
    kv.pushpull("turned", source.T, out=turned)
    one = mx.nd.zeros((10, 4))
    kv.pull("turned", out=one.reshape((4, 10)).reshape((10, 4)))
    return [array.asnumpy() for array in (target, flat, turned, one)]


@pytest.mark.parametrize("job", ["pair", "naive"])
def test_views_are_read_and_written_where_they_lie(job, request):
    source = 2 * np.arange(40).reshape(4, 10) + 1  # rank 0's and rank 1's
    for target, flat, turned, one in request.getfixturevalue(job).run(views):
        np.testing.assert_array_equal(target[1:3], source[1:3])
        np.testing.assert_array_equal(target[::3], -1)
        np.testing.assert_array_equal(flat, source)
        np.testing.assert_array_equal(turned, source.T)
        np.testing.assert_array_equal(one, source.T)


# ---- devices, and lists


def several_devices():
    kv = mx.kv.create(STORE)
    kv.init("w", mx.nd.zeros((20,)))
    values = [mx.nd.full((20,), 10**n + kv.rank, ctx=mx.cpu(n)) for n in (0, 1)]
    outs = [mx.nd.zeros((20,), ctx=mx.cpu(n)) for n in (0, 1)]
    kv.pushpull("w", values, out=outs)
    pulled = mx.nd.zeros((20,), ctx=mx.cpu(1))
    kv.pull("w", out=pulled)
    listed = mx.nd.zeros((20,))
    kv.pull("w", out=[listed])
    return [array.asnumpy() for array in (*outs, pulled, listed)]


@pytest.mark.parametrize("job", ["pair", "naive"])
def test_values_of_several_devices_are_summed_and_results_reach_them_all(job, request):
    for arrays in request.getfixturevalue(job).run(several_devices):
        for array in arrays:
            assert (array == 2 * (1 + 10) + 2 * (0 + 1)).all()


def pushpull_while_recording():
    kv = mx.kv.create("dist_sync_p3")
    weights = [mx.nd.ones((20,), mx.cpu(i)) for i in range(2)]
    for weight in weights:
        weight.attach_grad()
    kv.init("w", weights[0])
    with mx.autograd.record():
        loss = (weights[1] * 3).sum()
        kv.pushpull("w", [mx.nd.ones((20,), mx.cpu(i)) for i in range(2)], out=weights)
    loss.backward()
    return [weight.asnumpy().tolist() for weight in weights], weights[1].grad.asnumpy().tolist()


def test_calls_in_a_recorded_forward_pass_are_not_recorded(pair):
    for weights, gradient in pair.run(pushpull_while_recording):
        assert weights == [[4.0] * 20] * 2
        assert gradient == [3.0] * 20


def lists():
    kv = mx.kv.create(STORE)
    keys, values = ["a", 5, "5"], [mx.nd.full((9 + n,), n) for n in range(3)]
    kv.init(keys, values)
    outs = [mx.nd.zeros(value.shape) for value in values]
    kv.pushpull(keys, [value + kv.rank for value in values], out=outs)
    lone = mx.nd.zeros((9,))
    kv.pull(["a"], out=[[lone]])
    return [array.asnumpy() for array in (*outs, lone)]


def test_lists_of_keys_go_with_lists_of_values_and_5_is_not_the_string_5(pair):
    for zero, one, two, lone in pair.run(lists):
        assert (zero == 1).all()
        assert (one == 3).all()
        assert (two == 5).all()
        assert (lone == 1).all()


# ---- more than two gigabytes

SIZE = 2**29 + 12_345  # elements of four bytes
MARKS = [0, 1, 2**28, 2**29 - 1, 2**29, 2**29 + 1, SIZE - 1]
GIB = 2**30
FREE_BYTES = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def two_gigabytes():
    kv = mx.kv.create(STORE)
    array = mx.nd.zeros((SIZE,), dtype="int32")
    kv.init("w", array)
    for mark in MARKS:
        array[mark] = mark + 1
    pushed, array = array, mx.nd.empty((SIZE,), dtype="int32")
    kv.pushpull("w", pushed, out=array)
    return [array[mark].asscalar() for mark in MARKS]


@pytest.mark.slow
@pytest.mark.skipif(
    os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 10 * GIB,
    reason="too little memory",
)
def test_an_array_of_more_than_two_gigabytes_arrives_whole_and_without_many_copies():
    with LocalCluster(1, 1, deadline_s=120) as cluster:
        assert cluster.run(two_gigabytes) == [[mark + 1 for mark in MARKS]]
    assert set(cluster.exit_codes.values()) == {0}
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert largest < 8 * GIB  # of one process, and two of them are large
