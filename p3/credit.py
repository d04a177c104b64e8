"""How many bytes may be in flight: credit, end to end, over all links of a process together.

What has been sent and not yet taken by its receiver is in flight.  Whatever is beyond the
window waits in our own queue, where a more urgent slice can still overtake it, instead of in
socket buffers and switches, where nothing can.

The window follows ``rate x delay``: the highest delivery rate seen lately times the least
delay seen lately, doubled so that the path never runs dry, and never less than one message a
link.  Both are measured as in BBR (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 2016): the rate is the bytes delivered between a message's sending and its
credit, over that time; a delay that has not been seen for a while is measured anew with next
to nothing in flight, as on a path that is always full it would be that of our own queue,
which grows with the window.  Pure: time is passed in, in seconds.
"""

from __future__ import annotations

import collections
from typing import Deque, Dict, Tuple

_GAIN = 2.0
_RATE_MEMORY_S = 1.0
_DELAY_MEMORY_S = 5.0
_MAX_BYTES = 64 << 20


class _Highest:
    """The highest value of the last one to two periods."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._since = period_s, 0.0
        self._now = self._before = 0.0

    def add(self, value: float, now: float) -> None:
        if now - self._since > self._period_s:
            self._since, self._before, self._now = now, self._now, 0.0
        self._now = max(self._now, value)

    @property
    def value(self) -> float:
        return max(self._now, self._before)


class Window:
    """The credit of one process towards its peers.  Not thread-safe; owned by one thread."""

    def __init__(self, message_bytes: int, fixed_bytes: int = 0) -> None:
        """``message_bytes``: the usual message; ``fixed_bytes``: a fixed window, 0 to measure."""
        self.in_flight = 0
        self._message_bytes = message_bytes
        self._fixed_bytes = fixed_bytes
        self._delivered = 0
        self._rate = _Highest(_RATE_MEMORY_S)
        self._delay_s, self._delay_seen_at = float("inf"), 0.0
        self._measuring = False  # the delay, with no more than the least window in flight
        # peer -> messages in flight, oldest first: (bytes, sent at, delivered and in flight then)
        self._sent: Dict[bytes, Deque[Tuple[int, float, int, int]]] = {}
        self._owed: Dict[bytes, int] = {}  # peer -> bytes in flight on that link
        self.size_bytes = fixed_bytes or message_bytes

    def add_peer(self, peer: bytes) -> None:
        """A link exists; the window has room for one message more."""
        self._sent[peer] = collections.deque()
        self._owed[peer] = 0
        self._resize()

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be in flight; an idle process may always send."""
        return self.in_flight == 0 or self.in_flight + nbytes <= self.size_bytes

    def link_has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether the link to ``peer`` may hold ``nbytes`` more: of several, none takes all."""
        owed = self._owed[peer]
        if owed == 0 or len(self._owed) == 1:
            return True
        return owed + nbytes <= max(self._message_bytes, self.size_bytes // 2)

    def sent(self, peer: bytes, nbytes: int, now: float) -> None:
        """``nbytes`` have just been sent to ``peer``."""
        self._owed[peer] += nbytes
        self.in_flight += nbytes
        self._sent[peer].append((nbytes, now, self._delivered, self.in_flight))

    def credited(self, peer: bytes, nbytes: int, now: float) -> None:
        """``peer`` has taken ``nbytes``: whole messages, in the order they were sent."""
        messages = self._sent[peer]
        if nbytes > self._owed[peer]:
            raise ValueError(f"{peer!r} credits {nbytes} bytes of {self._owed[peer]} in flight")
        while nbytes > 0:
            size, sent_at, delivered, in_flight = messages.popleft()
            nbytes -= size
            self._owed[peer] -= size
            self.in_flight -= size
            self._delivered += size
            elapsed = max(now - sent_at, 1e-6)
            self._see_delay(elapsed, in_flight <= max(size, self._least_bytes), now)
            self._rate.add((self._delivered - delivered) / elapsed, now)
        self._resize()

    @property
    def _least_bytes(self) -> int:
        return max(1, len(self._owed)) * self._message_bytes

    def _see_delay(self, delay_s: float, on_quiet_path: bool, now: float) -> None:
        """Keep the least delay, and see to it that it is measured anew when it is old."""
        if delay_s <= self._delay_s or (self._measuring and on_quiet_path):
            self._delay_s, self._delay_seen_at, self._measuring = delay_s, now, False
        elif now - self._delay_seen_at > _DELAY_MEMORY_S:
            self._measuring = True

    def _resize(self) -> None:
        if self._fixed_bytes:
            return
        least = self._least_bytes
        path = 0.0
        if self._delivered and not self._measuring:
            path = self._rate.value * self._delay_s
        self.size_bytes = int(min(max(least, _GAIN * path), max(least, _MAX_BYTES)))

    def __repr__(self) -> str:
        return f"<Window {self.in_flight} of {self.size_bytes} bytes in flight>"
