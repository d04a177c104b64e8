"""Rounds: whose pushes are summed together, in which order, and who waits for the result.

A ``Unit`` is what one update applies to: a slice of a key, or the whole key where the
optimizer needs it in one piece.  A round of a unit takes exactly one push of every rank,
each rank's in the order it sent them: a second push of the same rank waits for the next
round, however late the others are.  Sums are made in rank order, so the same pushes give the
same bits whatever order they arrive in; float16 is summed in float32.

Asynchronous keys have no rounds: every push is a result of its own.

Pure: arrays in, arrays out; no clock, no I/O.
"""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from p3.rows import Rows
from p3.wire import Record

Array = Any  # numpy.ndarray; its type parameters say nothing here
Part = Union[Array, Rows]  #: a slice of a push: all of it, or some rows


class Push(NamedTuple):
    """One rank's contribution to one unit: ``parts`` are its slices, in order."""

    rank: int
    records: List[Record]
    parts: List[Part]
    extra: bytes


class Gathering:
    """Collects the slices of each rank's pushes until they are whole."""

    def __init__(self, slices: Sequence[int]) -> None:
        """``slices``: the indices of the unit's slices, in order."""
        self._slices = list(slices)
        self._partial: Dict[int, Dict[int, Any]] = {}

    def add(self, rank: int, record: Record, extra: bytes, part: Part) -> Optional[Push]:
        """The rank's push if this slice completes it."""
        if len(self._slices) == 1:
            return Push(rank, [record], [part], extra)
        partial = self._partial.setdefault(rank, {})
        partial[record.slice] = (record, part, extra)
        if len(partial) < len(self._slices):
            return None
        del self._partial[rank]
        ordered = [partial[index] for index in self._slices]
        return Push(rank, [o[0] for o in ordered], [o[1] for o in ordered], ordered[0][2])


class Rounds:
    """The pushes of one unit that wait for their round."""

    def __init__(self, num_workers: int) -> None:
        self._queues: List[Deque[Push]] = [collections.deque() for _ in range(num_workers)]

    def add(self, push: Push) -> None:
        """Queue ``push`` behind the earlier ones of its rank."""
        self._queues[push.rank].append(push)

    def next(self) -> Optional[List[Push]]:
        """One push of every rank, in rank order, if the next round is complete."""
        if not all(self._queues):
            return None
        return [queue.popleft() for queue in self._queues]

    def any(self) -> Optional[List[Push]]:
        """The next single push of any rank, for keys without rounds."""
        for queue in self._queues:
            if queue:
                return [queue.popleft()]
        return None

    def pushes(self) -> List[Push]:
        """All pushes that wait."""
        return [push for queue in self._queues for push in queue]

    def clear(self) -> None:
        """Forget the pushes that wait."""
        for queue in self._queues:
            queue.clear()

    def awaited(self) -> List[int]:
        """The ranks whose push the next round still lacks, if some rank's is there."""
        missing = [rank for rank, queue in enumerate(self._queues) if not queue]
        return missing if len(missing) < len(self._queues) else []


def total(pushes: Sequence[Push], out: Array) -> None:
    """Write the sum over ``pushes``, in their order, into the flat array ``out``."""
    start = 0
    for index, part in enumerate(pushes[0].parts):
        stop = start + part.size
        _sum([push.parts[index] for push in pushes], out[start:stop])
        start = stop


def _sum(parts: Sequence[Part], out: Array) -> None:
    first, others = parts[0], parts[1:]
    if not others and not isinstance(first, Rows):
        np.copyto(out, first)
        return
    wide = out if out.dtype != np.float16 else np.empty(len(out), np.float32)
    if isinstance(first, Rows):
        wide.fill(0)
        wide[first.offsets] = first.values
    elif not isinstance(others[0], Rows):  # the first two at once
        np.add(first, others[0], out=wide, dtype=wide.dtype)
        others = others[1:]
    else:
        np.copyto(wide, first)
    for part in others:
        if isinstance(part, Rows):
            wide[part.offsets] += part.values
        else:
            np.add(wide, part, out=wide)
    if wide is not out:
        np.copyto(out, wide, casting="same_kind")
