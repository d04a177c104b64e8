"""Row-sparse gradients: which rows of a key, and the values of those elements in a slice.

A key of shape ``(rows, ...)`` is cut into slices like any other, so a row may lie in two of
them.  What a push or a pull says about one slice is

    n u64 | n row ids, i64, ascending | values of those rows' elements in the slice

(a pull has no values, and the answer to it nothing else).  Ids are rows of the whole key.  A
slice without any of the rows still gets its record: the round waits for every rank.

Pure: NumPy only.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np

Array = Any  # numpy.ndarray
_COUNT = struct.Struct("<Q")


class Rows(NamedTuple):
    """Some of the ``size`` elements of a flat array: ``values`` at ascending ``offsets``."""

    offsets: Array
    values: Array
    size: int


def span(ids: Array, row_elems: int, start: int, stop: int) -> Tuple[int, int, int, int]:
    """What of the sorted rows ``ids`` lies in elements ``start`` to ``stop`` of their key.

    ``(first id, last id, first element, last element)``, exclusive where last: elements count
    from the first of the first row of ``ids``, as if the rows stood one after another.
    """
    if not len(ids) or not row_elems or stop <= start:
        return 0, 0, 0, 0
    low, high = np.searchsorted(ids, [start // row_elems, (stop - 1) // row_elems + 1])
    if low == high:
        return 0, 0, 0, 0
    first, last = int(low) * row_elems, int(high) * row_elems
    first += max(0, start - int(ids[low]) * row_elems)
    last -= max(0, (int(ids[high - 1]) + 1) * row_elems - stop)
    return int(low), int(high), first, last


def encode(ids: Array, values: Any = b"") -> bytes:
    """The payload about one slice: sorted int64 ids, and the bytes of their elements in it."""
    return b"".join((_COUNT.pack(len(ids)), ids.tobytes(), values))


def decode(
    payload: Any, dtype: str, row_elems: int, start: int, stop: int, with_values: bool
) -> Rows:
    """A payload's elements, at offsets from the slice's ``start``.  Raises ``ValueError``."""
    count = _COUNT.unpack_from(payload)[0] if len(payload) >= _COUNT.size else -1
    end = _COUNT.size + 8 * count
    if count < 0 or end > len(payload):
        raise ValueError(f"rows: {len(payload)} bytes for {count} ids")
    ids = np.frombuffer(payload[_COUNT.size : end], np.int64)
    if count and not (
        (np.diff(ids) > 0).all()
        and ids[0] * row_elems > start - row_elems
        and 0 <= ids[-1] < -(-stop // max(row_elems, 1))
    ):
        raise ValueError(f"rows: {count} ids that are not ascending rows of the slice")
    offsets = (ids[:, None] * row_elems + np.arange(row_elems)).ravel()
    offsets = offsets[(offsets >= start) & (offsets < stop)] - start
    values = np.frombuffer(payload[end:], dtype)
    if len(values) != (len(offsets) if with_values else 0):
        raise ValueError(f"rows: {len(values)} values for {len(offsets)} elements")
    return Rows(offsets, values, stop - start)


def add_up(parts: Sequence[Rows], dtype: Any) -> Rows:
    """The sum of several, in their order; float16 is summed in float32."""
    if len(parts) == 1:
        return parts[0]
    wide = np.float32 if np.dtype(dtype) == np.float16 else dtype
    offsets = np.unique(np.concatenate([part.offsets for part in parts]))
    values = np.zeros(len(offsets), wide)
    for part in parts:
        values[np.searchsorted(offsets, part.offsets)] += part.values
    return Rows(offsets, values.astype(dtype, copy=False), parts[0].size)


def join(parts: Sequence[Rows]) -> Rows:
    """Those of slices that lie one after another, as one."""
    if len(parts) == 1:
        return parts[0]
    offsets, size = [], 0
    for part in parts:
        offsets.append(part.offsets + size)
        size += part.size
    values = np.concatenate([part.values for part in parts])
    return Rows(np.concatenate(offsets), values, size)
