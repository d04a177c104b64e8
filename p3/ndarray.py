"""What p3 asks of an NDArray: its kind, its identity, its memory.

MXNet's own properties give up the interpreter lock in every call, and getting it back from
p3's other threads takes far longer than the call.  The questions asked here for every key of
every step therefore go through ``quick``: functions that keep the lock, and never wait.

What is relied on of MXNet 1.9.1 beyond its C API, checked when this module is imported: an
NDArray begins with the pointer to its chunk, and a chunk with its data pointer
(``include/mxnet/ndarray.h``).  oneDNN may keep a weight in a layout of its own; the chunk can
bring it back to plain memory, in the middle of an operation that writes it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Tuple

import mxnet as mx
import numpy as np

from p3.errors import UsageError

_lib = mx.base._LIB
#: the same library; its functions keep the interpreter lock, so they must not wait for a thread
quick = ctypes.PyDLL(_lib._name)
_byref, _Int, _Int64 = ctypes.byref, ctypes.c_int, ctypes.c_int64
_DTYPES = {
    number: np.dtype(kind).name
    for number, kind in mx.ndarray.ndarray._DTYPE_MX_TO_NP.items()
    if kind is not None
}
_DTYPES[12] = "bfloat16"  # NumPy has no such type
_CPU_DEVICES = frozenset((1, 3, 5))  # cpu, cpu_pinned, cpu_shared
_DENSE = 0


def dtype(array: Any) -> str:
    """The name of the array's dtype, as NumPy calls it."""
    number = _Int()
    mx.base.check_call(quick.MXNDArrayGetDType(array.handle, _byref(number)))
    return _DTYPES.get(number.value, f"number {number.value}")


def shape(array: Any) -> Tuple[int, ...]:
    """The array's shape."""
    ndim, sizes = _Int(), ctypes.POINTER(_Int64 if _int64 else _Int)()
    mx.base.check_call(_get_shape(array.handle, _byref(ndim), _byref(sizes)))
    return tuple(sizes[: ndim.value]) if ndim.value > 0 else ()


def is_dense(array: Any) -> bool:
    """Whether the array is stored as one block of all its elements."""
    kind = _Int()
    mx.base.check_call(quick.MXNDArrayGetStorageType(array.handle, _byref(kind)))
    return kind.value == _DENSE


def on_cpu(array: Any) -> bool:
    """Whether the array is in this host's memory."""
    kind, number = _Int(), _Int()
    mx.base.check_call(quick.MXNDArrayGetContext(array.handle, _byref(kind), _byref(number)))
    return kind.value in _CPU_DEVICES


def chunk(array: Any) -> int:
    """The identity of the memory that ``array`` is, or is a view of."""
    return ctypes.c_void_p.from_address(array.handle.value).value or 0


def memory(array: Any, nbytes: int, writing: bool = False) -> memoryview:
    """The ``nbytes`` of a CPU array, for use while an operation on it is open; not a copy.

    The view keeps the array's memory alive.  ``writing``: the open operation writes it.
    """
    if writing and _plain is not None:
        _plain(chunk(array))
    pointer = ctypes.c_void_p()
    mx.base.check_call(quick.MXNDArrayGetData(array.handle, _byref(pointer)))
    if nbytes == 0 or not pointer.value:
        return memoryview(b"")
    buffer = (ctypes.c_char * nbytes).from_address(pointer.value)
    setattr(buffer, "array", array)  # noqa: B010  # so that the view keeps it alive
    return memoryview(buffer).cast("B")


def make_plain(array: Any) -> None:
    """Have the engine bring ``array`` to plain memory before the operations that follow."""
    if _make_plain is not None and len(shape(array)) > 1:
        _make_plain(array.handle)


def wait_to_write(array: Any) -> None:
    """Block until nothing reads or writes ``array`` any more."""
    mx.base.check_call(_lib.MXNDArrayWaitToWrite(array.handle))


def _method(name: str) -> Any:
    """A C++ method of MXNet's library, or ``None`` in builds without oneDNN."""
    try:
        method = getattr(quick, name)
    except AttributeError:
        return None
    method.argtypes, method.restype = [ctypes.c_void_p], None
    return method


_int64 = mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE")
_get_shape = quick.MXNDArrayGetShapeEx64 if _int64 else quick.MXNDArrayGetShapeEx
_make_plain = _method("_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv")
_plain = _method("_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv")


def _check_layout() -> None:
    """Raise unless NDArrays are laid out as this module relies on."""
    array = mx.nd.ones((3,), ctx=mx.cpu())
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(_lib.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    if ctypes.c_void_p.from_address(chunk(array)).value != pointer.value:
        raise UsageError(
            f"this build of MXNet ({mx.__version__}) lays arrays out differently from 1.9.1,"
            " which p3 is made for; install mxnet 1.9.1"
        )


_check_layout()
