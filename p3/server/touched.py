"""Row-sparse pushes at an optimizer: only the rows that some rank has touched are updated.

So do MXNet's own updates with row-sparse gradients, for optimizers that have one; to the
others MXNet gives the gradient as a dense array, and so does the updater.  A slice of a
key is an array of single elements here, and its rows are those.
"""

from __future__ import annotations

import math
from typing import Any, List, Optional, Tuple

import numpy as np

from p3 import rows, sparse
from p3.rounds import Push
from p3.rows import Rows

#: optimizers with an update of their own for row-sparse gradients of dense weights
_SPARSE = frozenset("SGD Adam AdaGrad GroupAdaGrad".split())


def update_rows(updater: Any, slot: Any, pushes: List[Push]) -> bool:
    """Update the slot's weight by row-sparse pushes; ``False`` if that takes a dense gradient."""
    optimizer = updater.optimizer
    touched = touched_rows(pushes) if type(optimizer).__name__ in _SPARSE else None
    if touched is None:
        return False
    if not len(touched.offsets):
        if getattr(optimizer, "lazy_update", True):
            optimizer._update_count(slot.index)
            return True
        touched = _one_zero(touched, slot.weight.shape)  # MXNet passes over a gradient without rows
    updater(slot.index, row_sparse(touched, slot.weight.shape), slot.weight)
    slot.weight.wait_to_read()
    return True


def _one_zero(touched: Rows, shape: Tuple[int, ...]) -> Rows:
    row_elems = math.prod(shape[1:])
    return Rows(np.arange(row_elems), np.zeros(row_elems, touched.values.dtype), touched.size)


def touched_rows(pushes: List[Push]) -> Optional[Rows]:
    """The sum of row-sparse pushes; ``None`` if one of them is dense."""
    parts: List[Rows] = []
    for place in range(len(pushes[0].parts)):
        these = [push.parts[place] for push in pushes]
        found = [part for part in these if isinstance(part, Rows)]
        if len(found) < len(these):
            return None
        parts.append(rows.add_up(found, found[0].values.dtype))
    return rows.join(parts)


def row_sparse(touched: Rows, shape: Tuple[int, ...]) -> Any:
    """``touched`` as a row-sparse gradient of an array of ``shape``."""
    row_elems = math.prod(shape[1:])
    ids = touched.offsets[::row_elems] // row_elems
    values = touched.values.reshape((-1, *shape[1:]))
    return sparse.made_of(ids, values, shape)
