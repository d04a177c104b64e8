"""Who has fallen silent.  Pure: the time is passed in."""

from __future__ import annotations

from typing import Dict, List, Optional


class Liveness:
    """When each peer was last heard; used by the scheduler and by its clients alike.

    Silence proves nothing while we were not listening ourselves (stopped by a signal, or
    starved of the processor): if ``silent`` was not called for half the timeout, that time
    is not counted against anybody.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard: Dict[bytes, float] = {}
        self._checked: Optional[float] = None

    def heard(self, peer: bytes, now: float) -> None:
        """Watch ``peer`` from now on, or note that it lives."""
        self._heard[peer] = now

    def forget(self, peer: bytes) -> None:
        """Stop watching ``peer``."""
        self._heard.pop(peer, None)

    def silent(self, now: float) -> List[bytes]:
        """The peers not heard for the timeout; call it several times within one timeout."""
        gap = 0.0 if self._checked is None else now - self._checked
        if gap > self._timeout_s / 2:
            for peer, when in self._heard.items():
                self._heard[peer] = min(now, when + gap)
        self._checked = now
        return [peer for peer, when in self._heard.items() if now - when > self._timeout_s]
