"""Rounds that lack a push: who is awaited, since when, and when waiting makes no sense any more.

A rank that has said goodbye pushes no more, so its rounds fail at once.  A rank that is there
may take its time: after ``stall_report_s`` those that wait are told whom they wait for, again
after as long, and only after ``round_timeout_s``, if there is such a limit, the round fails.

Pure; time is passed in, in seconds.  Owned by the shard.
"""

from __future__ import annotations

from typing import Dict, Generic, List, Optional, Sequence, Set, Tuple, TypeVar

_CHECK_S = 0.5

U = TypeVar("U")


class Waiting(Generic[U]):
    """The units that wait, by the time at which they began to."""

    def __init__(self, stall_report_s: float, round_timeout_s: float) -> None:
        """0: never, for either."""
        self.now = 0.0
        self._report_s, self._timeout_s = stall_report_s, round_timeout_s
        self._since: Dict[U, Tuple[float, int]] = {}  # when, and reports made since
        self._checked = 0.0
        self._gone: Set[int] = set()

    def note(self, unit: U, awaited: Sequence[int]) -> None:
        """``unit`` waits for these ranks now; none: it does not wait."""
        if not awaited:
            self._since.pop(unit, None)
        elif unit not in self._since:
            self._since[unit] = (self.now, 0)

    def restart(self, unit: U) -> None:
        """``unit`` has got further: what it waits for from now on is another round."""
        self._since.pop(unit, None)

    def leave(self, rank: int) -> List[U]:
        """``rank`` has said goodbye; the units that wait, of which some wait for it."""
        self._gone.add(rank)
        return list(self._since)

    def gone(self, awaited: Sequence[int]) -> Optional[int]:
        """One of these ranks that will never push again, if there is one."""
        return next((rank for rank in awaited if rank in self._gone), None)

    def late(self, now: float) -> List[Tuple[U, float, bool]]:
        """``(unit, seconds, whether it is too late)`` of all that there is something to say of."""
        self.now = now
        if now - self._checked < _CHECK_S:
            return []
        self._checked = now
        found = []
        for unit, (since, reports) in list(self._since.items()):
            waited_s = now - since
            over = 0 < self._timeout_s <= waited_s
            if over or 0 < self._report_s * (reports + 1) <= waited_s:
                self._since[unit] = (since, reports + 1)
                found.append((unit, waited_s, over))
        return found
