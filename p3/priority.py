"""The ordering rule, and the queue that keeps it: ``(-priority, arrival)``, both directions.

Higher priority first; among equals, first come first served.  Nothing else is compared.
``Outbox`` holds what a process has to send, a heap a peer, and gives out the next message
when credit allows.  An urgent message that has no room yet is not overtaken by a smaller one:
it would only wait longer.

Small slices travel together: a message is filled with the same peer's next most urgent items
up to ``message_bytes``.  Pure; owned by one thread.
"""

from __future__ import annotations

import heapq
from typing import Dict, List, Optional, Tuple

from p3.credit import Window
from p3.wire import RECORD_BYTES, Item

_Entry = Tuple[int, int, int, Item]  # -priority, arrival, bytes, item


class Outbox:
    """Items waiting for their turn and for credit, by peer."""

    def __init__(self, window: Window, message_bytes: int) -> None:
        """``message_bytes``: how much may share a message (one larger item goes alone)."""
        self._window = window
        self._message_bytes = message_bytes
        self._heaps: Dict[bytes, List[_Entry]] = {}
        self._arrivals = 0
        self.waiting_bytes = 0

    def add_peer(self, peer: bytes) -> None:
        """Items for ``peer`` may be put from now on."""
        self._heaps[peer] = []
        self._window.add_peer(peer)

    def put(self, peer: bytes, item: Item) -> None:
        """Queue ``item`` by its record's priority."""
        nbytes = RECORD_BYTES + len(item.extra) + len(item.payload)
        self._arrivals += 1
        entry = (-item.record.priority, self._arrivals, nbytes, item)
        heapq.heappush(self._heaps[peer], entry)
        self.waiting_bytes += nbytes

    def take(self) -> Optional[Tuple[bytes, List[Item]]]:
        """The next message, ``(peer, items)``, or ``None`` if nothing may be sent now."""
        peer = self._most_urgent()
        if peer is None:
            return None
        heap = self._heaps[peer]
        items: List[Item] = []
        total = 0
        while heap and (not items or total + heap[0][2] <= self._message_bytes):
            _, _, nbytes, item = heapq.heappop(heap)
            items.append(item)
            total += nbytes
        self.waiting_bytes -= total
        return peer, items

    def _most_urgent(self) -> Optional[bytes]:
        """The peer of the most urgent item on a link with room, if the window has room for it."""
        best: Optional[bytes] = None
        first: Optional[_Entry] = None
        for peer, heap in self._heaps.items():
            if not heap or (first is not None and heap[0][:2] > first[:2]):
                continue
            if self._window.link_has_room(peer, heap[0][2]):
                best, first = peer, heap[0]
        return best if first is not None and self._window.has_room(first[2]) else None

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __repr__(self) -> str:
        return f"<Outbox {len(self)} items, {self.waiting_bytes} bytes; {self._window!r}>"
