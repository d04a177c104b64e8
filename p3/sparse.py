"""Row-sparse arrays of MXNet: what is in them, and how to fill them.

MXNet gives out the ids and values of a row-sparse array only when it has been computed, and
only by a copy that waits.  So these calls block, and pushes make them on a background thread.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import mxnet as mx
import numpy as np

from p3.errors import UsageError

Array = Any  # numpy.ndarray


def is_row_sparse(array: Any) -> bool:
    """Whether ``array`` is one of MXNet's row-sparse arrays."""
    return isinstance(array, mx.nd.sparse.RowSparseNDArray)


def alike(arrays: List[Any]) -> List[Any]:
    """``arrays``, all of them dense if some are."""
    found = [is_row_sparse(array) for array in arrays]
    if all(found) or not any(found):
        return arrays
    return [array.tostype("default") for array in arrays]


def private(arrays: List[Any]) -> Any:
    """A row-sparse array on the CPU that nobody else can change: the sum of ``arrays``.

    Returns at once; MXNet computes it when ``arrays`` are there.
    """
    here = [array.as_in_context(mx.cpu()) for array in arrays]
    return here[0].copy() if len(here) == 1 else mx.nd.add_n(*here)


def contents(array: Any) -> Tuple[Array, Array]:
    """``(ids, values)``: ascending row numbers, int64, and their elements.  Blocks.

    Rows that ``array`` has twice are added up.  Raises ``MXNetError`` if it could not be
    computed, ``UsageError`` if it has a row that its shape has not.
    """
    ids = array.indices.asnumpy().astype(np.int64)
    values = array.data.asnumpy()
    if len(ids) and not 0 <= ids.min() <= ids.max() < array.shape[0]:
        raise UsageError(f"it has rows {ids.min()} to {ids.max()} of {array.shape[0]}")
    if len(ids) > 1 and not (np.diff(ids) > 0).all():
        given, added = values, ids
        ids, places = np.unique(added, return_inverse=True)
        values = np.zeros((len(ids), *given.shape[1:]), given.dtype)
        np.add.at(values, places, given)
    return ids, np.ascontiguousarray(values)


def wanted(key: Any, row_ids: Any, rows: int) -> Array:
    """The row numbers in ``row_ids``, each once, ascending, int64.  Blocks until they are there.

    Raises ``UsageError`` for one that is not from 0 to ``rows``, exclusive.
    """
    ids: Array = np.unique(row_ids.asnumpy().astype(np.int64))
    if len(ids) and not 0 <= ids[0] <= ids[-1] < rows:
        worst = ids[0] if ids[0] < 0 else ids[-1]
        raise UsageError(f"row_sparse_pull of key {key!r}: there is no row {worst} of {rows}")
    return ids


def made_of(ids: Array, values: Array, shape: Tuple[int, ...]) -> Any:
    """A row-sparse array of ``shape`` that consists of these rows, of the values' dtype."""
    content = mx.nd.array(values, dtype=values.dtype), mx.nd.array(ids, dtype=np.int64)
    return mx.nd.sparse.row_sparse_array(content, shape=shape)


def fill(out: Any, ids: Array, values: Array) -> None:
    """Make the row-sparse ``out`` consist of these rows."""
    with mx.autograd.pause():  # rows are pulled in the middle of a recorded forward pass
        made_of(ids, values.astype(out.dtype, copy=False), out.shape).copyto(out)
