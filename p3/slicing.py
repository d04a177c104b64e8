"""Cut a key into slices and say which server holds each: a pure function of its arguments.

Slices are the units of placement, of priority and of update: at most ``slice_elems``
elements each, consecutive, the last one the remainder.  Slice ``i`` lives on server
``(first + i) % num_servers`` (round-robin, as in the P3 paper, section 4.2), or all of them
on ``first`` where the optimizer needs the key in one piece.  ``first`` is chosen once for
the whole job, so every process that cuts the same key gets the same plan.
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Tuple


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` (exclusive) of a flattened key, held by ``server``."""

    number: int
    start: int
    stop: int
    server: int


def cut(size: int, slice_elems: int, first: int, num_servers: int, whole: bool) -> List[Slice]:
    """The slices of a key of ``size`` elements, in order; at least one, even if empty.

    ``first``: the server of slice 0.  ``whole``: keep all slices on that server.
    """
    if size < 0 or slice_elems < 1 or not 0 <= first < num_servers:
        raise ValueError(
            f"cannot cut size={size}, slice_elems={slice_elems}, first={first} of {num_servers}"
        )
    starts = range(0, max(size, 1), slice_elems)
    return [
        Slice(
            index,
            start,
            min(start + slice_elems, size),
            first if whole else (first + index) % num_servers,
        )
        for index, start in enumerate(starts)
    ]


class KeyEntry(NamedTuple):
    """What the scheduler tells every process about a key.

    ``key``: int or str; ``space``: which store of the script it belongs to; ``first``: the
    server of its first slice; ``whole``: all slices there, updated in one piece.
    """

    id: int
    space: int
    key: Any
    shape: Tuple[int, ...]
    dtype: str
    mode: str  # "sync" or "async"
    whole: bool
    first: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def row_elems(self) -> int:
        """Elements of a row, which is what one index of the first axis has."""
        return math.prod(self.shape[1:])

    def slices(self, slice_elems: int, num_servers: int) -> List[Slice]:
        """The key's slices, the same in every process."""
        return cut(self.size, slice_elems, self.first, num_servers, self.whole)
