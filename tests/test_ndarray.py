"""What p3 asks of arrays, against MXNet's own properties, and that asking keeps the lock."""

from __future__ import annotations

import threading

import mxnet as mx
import numpy as np
import pytest

from p3 import ndarray


def answers(array):
    return ndarray.dtype(array), ndarray.shape(array), ndarray.is_dense(array)


@pytest.mark.parametrize("dtype", "float16 float32 float64 int8 uint8 int32 int64 bool".split())
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 1, 3, 1)])
def test_dtype_and_shape_are_the_arrays(dtype, shape):
    array = mx.nd.zeros(shape, dtype=dtype)
    assert answers(array) == (dtype, array.shape, True)
    assert ndarray.dtype(array) == np.dtype(array.dtype).name


def test_scalars_and_empty_arrays_under_np_shape():
    with mx.util.np_shape(True):
        assert ndarray.shape(mx.np.zeros(())) == ()
        assert ndarray.shape(mx.np.zeros((3, 0))) == (3, 0)


def test_sparse_arrays_are_not_dense():
    assert not ndarray.is_dense(mx.nd.sparse.zeros("row_sparse", (3, 2)))
    assert not ndarray.is_dense(mx.nd.sparse.zeros("csr", (3, 2)))


@pytest.mark.parametrize("device", [mx.cpu(0), mx.cpu(3)])
def test_every_cpu_is_this_host(device):
    assert ndarray.on_cpu(mx.nd.zeros((2,), device))


def test_views_share_their_chunk_and_know_their_memory():
    array = mx.nd.arange(6, dtype="float32")
    view = array[2:4]
    view.wait_to_read()
    assert ndarray.chunk(view) == ndarray.chunk(array) != ndarray.chunk(array.copy())
    assert np.frombuffer(ndarray.memory(view, 8), np.float32).tolist() == [2, 3]


def test_asking_never_lets_another_thread_run(request):
    """Each hand-over of the interpreter lock costs more than the question."""
    import sys

    array, ran, stop = mx.nd.zeros((3, 4)), [0], threading.Event()

    def count():
        while not stop.is_set():
            ran[0] += 1

    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    other = threading.Thread(target=count, daemon=True)
    other.start()
    sys.setswitchinterval(100)
    while not ran[0]:
        array.wait_to_read()  # lets it run
    before = ran[0]
    for _ in range(100):
        answers(array)
        ndarray.on_cpu(array)
        ndarray.memory(array, 48)
    after = ran[0]
    stop.set()
    sys.setswitchinterval(interval)
    other.join(60)
    assert after == before
