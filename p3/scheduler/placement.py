"""Which server gets which slice.  Pure: no clock, no socket, no randomness.

The scheduler alone places keys, in the order in which it first hears of them, and tells
everybody; so the plan is the same on all ranks whatever the order of their calls.

Slice ``i`` of a key whose first server is ``first`` lives on ``(first + i) % num_servers``,
or on ``first`` if the key must stay whole.  Only ``first`` is free, and it is chosen so
that the bytes on the servers end up as even as they can: the least loaded server takes the
odd bytes, ties go to the lowest index.
"""

from __future__ import annotations

from typing import List, Sequence

#: What a slice costs a server besides its bytes (a message), so that empty keys spread too.
OVERHEAD_BYTES = 64


class Placement:
    """The bytes given to each of ``num_servers`` servers so far.

    Not thread-safe: it belongs to the scheduler's state machine.
    """

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise ValueError(f"num_servers={num_servers}: must be at least 1")
        self._loads = [0] * num_servers

    @property
    def loads_bytes(self) -> List[int]:
        """Bytes on each server, the overhead of messages included."""
        return list(self._loads)

    def place(self, sizes_bytes_of_slices: Sequence[int], whole: bool) -> int:
        """Place one key, given the bytes of each of its slices; return its first server."""
        shares = self._shares(sizes_bytes_of_slices, whole)
        first = min(range(len(self._loads)), key=lambda start: self._unevenness(shares, start))
        for offset, share in enumerate(shares):
            self._loads[(first + offset) % len(self._loads)] += share
        return first

    def _shares(self, sizes: Sequence[int], whole: bool) -> List[int]:
        """The bytes that the first server, the one after it, and so on would take."""
        count = len(self._loads)
        if whole:
            return [sum(sizes) + OVERHEAD_BYTES] + [0] * (count - 1)
        sizes = sizes or [0]
        return [
            sum(sizes[offset::count]) + OVERHEAD_BYTES * len(sizes[offset::count])
            for offset in range(count)
        ]

    def _unevenness(self, shares: Sequence[int], start: int) -> int:
        """Grows with the sum of squares of the loads, were the key to begin at ``start``.

        sum((load + share)**2) = sum(load**2) + sum(share**2) + 2 * sum(load * share), and
        only the last term depends on the start.  For a single slice it is the least loaded
        server that makes it smallest.
        """
        count = len(self._loads)
        return sum(
            self._loads[(start + offset) % count] * share for offset, share in enumerate(shares)
        )

    def __repr__(self) -> str:
        return f"<Placement, bytes on each server: {self._loads}>"
