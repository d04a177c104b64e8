"""The barrier: nobody goes on before all have arrived.  Pure."""

from __future__ import annotations

import collections
from typing import Deque, Dict, Iterable, List, Optional, Tuple


class Barrier:
    """Requests of workers that wait for each other.

    A rank that asks twice before the others have asked once waits at two barriers, one
    after the other.
    """

    def __init__(self) -> None:
        self._waiting: Dict[int, Deque[int]] = {}  # rank -> its requests, oldest first

    @property
    def waiting(self) -> List[int]:
        """The ranks that wait."""
        return sorted(self._waiting)

    def arrive(self, rank: int, req: int) -> None:
        """``rank`` waits from now on; its request ``req`` is to be answered."""
        self._waiting.setdefault(rank, collections.deque()).append(req)

    def release(self, present: Iterable[int]) -> Optional[List[Tuple[int, int]]]:
        """(rank, request) of everybody, if all of ``present`` wait; else ``None``."""
        if not self._waiting or not all(rank in self._waiting for rank in present):
            return None
        released = []
        for rank in self.waiting:
            released.append((rank, self._waiting[rank].popleft()))
            if not self._waiting[rank]:
                del self._waiting[rank]
        return released

    def leave(self, rank: int) -> List[Tuple[int, int]]:
        """``rank`` will not come any more: (rank, request) of the others, now in vain."""
        self._waiting.pop(rank, None)
        lost = [(other, req) for other in self.waiting for req in self._waiting[other]]
        self._waiting.clear()
        return lost
