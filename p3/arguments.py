"""What a call of the store was given: its keys and arrays, checked, and where results go."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import mxnet as mx
import numpy as np

from p3 import ndarray
from p3.errors import UsageError
from p3.worker import Key

_DTYPES = frozenset("float16 float32 float64 int8 uint8 int32 int64".split())


def pairs(key: Any, value: Any) -> Iterator[Tuple[Any, List[Any]]]:
    """``(key, arrays)`` of a call: one key or a list of them, each with its devices' arrays.

    A key that is in the list several times comes once, with the arrays of all places.
    """
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(key):
            raise UsageError(f"{len(key)} keys need a list of {len(key)} values")
        grouped: Dict[Any, List[Any]] = {}
        for one, values in zip(key, value):
            for name, arrays in pairs(one, values):
                grouped.setdefault(name, []).extend(arrays)
        yield from grouped.items()
        return
    if isinstance(key, np.integer):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise UsageError(f"a key must be an int or a str, not {key!r}")
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays:
        raise UsageError(f"key {key!r}: an empty list of values")
    yield key, arrays


def overwritten(
    both: Sequence[Tuple[Tuple[Any, Sequence[Any]], Tuple[Any, Sequence[Any]]]],
) -> bool:
    """Whether a key's outs are memory that a later key's values are read from.

    ``both``: ``(key, values), (key, outs)`` for every key of a call, in order.
    """
    written: Set[int] = set()
    for (_, values), (_, outs) in both:
        if not written.isdisjoint(_chunks(values)):
            return True
        written.update(_chunks(outs))
    return False


def _chunks(arrays: Sequence[Any]) -> List[int]:
    """The memory of those ``arrays`` that are arrays."""
    return [ndarray.chunk(array) for array in arrays if isinstance(array, mx.nd.NDArray)]


def check_array(name: Any, array: Any, sparse: bool = False) -> str:
    """The array's dtype; raises unless p3 can store it.  ``sparse``: it may be row-sparse."""
    if not isinstance(array, mx.nd.NDArray):
        raise UsageError(f"key {name!r}: an mx.nd.NDArray is needed, not {type(array).__name__}")
    if not ndarray.is_dense(array) and not (sparse and array.stype == "row_sparse"):
        raise UsageError(f"key {name!r}: {array.stype} arrays are not supported here")
    dtype = ndarray.dtype(array)
    if dtype not in _DTYPES:
        raise UsageError(f"key {name!r}: dtype {dtype} is not supported")
    return dtype


def on_cpu(array: Any) -> Any:
    """``array``, or its copy in pinned memory if it is on a GPU."""
    if ndarray.on_cpu(array):
        return array
    return array.as_in_context(mx.cpu_pinned())


def total(values: Sequence[Any]) -> Any:
    """The sum of the devices' values, on the CPU; the value itself if there is one."""
    arrays = [on_cpu(value) for value in values]
    if len(arrays) == 1:
        return arrays[0]
    context = arrays[0].context
    with mx.autograd.pause():
        return mx.nd.add_n(*[a.as_in_context(context).as_nd_ndarray() for a in arrays])


def target(key: Key, outs: Sequence[Any]) -> Any:
    """Where the result is written first: the first array that has its dtype and is on the CPU."""
    for array in outs:
        if ndarray.on_cpu(array) and ndarray.dtype(array) == key.dtype:
            return array
    on_gpu = outs[0].context.device_type == "gpu"
    context = mx.cpu_pinned() if on_gpu else mx.cpu()
    return mx.nd.empty(key.shape, context, key.dtype)


def spread(target: Any, outs: Sequence[Any]) -> None:
    """Copy the result to the other devices' arrays, also inside ``autograd.record()``."""
    for array in outs:
        if array is not target:
            with mx.autograd.pause():  # MXNet records no copy into a parameter
                target.copyto(array)
