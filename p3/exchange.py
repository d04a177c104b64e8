"""Port, outbox and credit joined: what a worker's and a server's loop have in common.

Owned by the one thread that runs the loop.  ``receive`` takes what has come, returns credit
for it before anything else is done (taking is what credit means, not processing), and sends
what new credit allows.  Bad messages are dropped, counted and logged, a few of them, and
never end the loop.

Peers greet each other on both channels before the first item, so that neither side ever has
to send to somebody whose connection is not there yet.
"""

from __future__ import annotations

import logging
import time
from typing import Dict, List, Optional, Set, Tuple

from p3.credit import Window
from p3.priority import Outbox
from p3.transport import Channel, Message, Port
from p3.wire import (
    GREETING,
    INLINE_BYTES,
    Item,
    WireError,
    decode,
    decode_credit,
    encode,
    encode_credit,
    size_of,
)

_log = logging.getLogger("p3")
_LOGGED_ERRORS = 20
#: a fixed window holds at least this many messages; if it is wide, a message carries several
#: slices, which saves as much work as there are fewer messages
_MESSAGES_IN_WINDOW = 8


class Exchange:
    """Sends items by priority within credit, and receives them."""

    def __init__(self, port: Port, slice_bytes: int, credit_bytes: int) -> None:
        """``slice_bytes``: a full slice; ``credit_bytes``: a fixed window, 0 to measure."""
        self._port = port
        message_bytes = max(slice_bytes + INLINE_BYTES, credit_bytes // _MESSAGES_IN_WINDOW)
        self._window = Window(message_bytes, credit_bytes)
        self._outbox = Outbox(self._window, message_bytes)
        self.bad_messages = 0
        self.greeted: Set[Tuple[Channel, bytes]] = set()

    def connect(self, peer: bytes, data: str, credit: str, token: bytes) -> None:
        """Connect to the listener ``peer`` and greet it; its greetings show up in ``greeted``."""
        self._outbox.add_peer(peer)
        self._port.connect(Channel.DATA, peer, data, token)
        self._port.connect(Channel.CREDIT, peer, credit, token)
        self._port.send(Channel.DATA, peer, GREETING)
        self._port.send(Channel.CREDIT, peer, [encode_credit(0)])

    def accept(self, peer: bytes, token: bytes) -> None:
        """Admit ``peer``, which will connect and greet under ``token``."""
        self._outbox.add_peer(peer)
        self._port.admit(token, peer)

    def put(self, peer: bytes, item: Item) -> None:
        """Queue ``item``; ``pump`` sends it when its turn and credit have come."""
        self._outbox.put(peer, item)

    def pump(self) -> None:
        """Send what may be sent now."""
        while True:
            message = self._outbox.take()
            if message is None:
                return
            peer, items = message
            frames = encode(items)
            if self._port.send(Channel.DATA, peer, frames, copy=False):
                self._window.sent(peer, size_of(frames), time.monotonic())

    def receive(self, timeout_s: Optional[float]) -> List[Tuple[bytes, List[Item]]]:
        """Items that have come, as ``(peer, items)``; empty after a timeout or a wake."""
        messages = self._port.recv(timeout_s)
        now = time.monotonic()
        taken: Dict[bytes, int] = {}
        arrived: List[Tuple[bytes, List[Item]]] = []
        for message in messages:
            try:
                if message.channel is Channel.CREDIT:
                    self._credited(message, now)
                else:
                    items = self._items(message)
                    if items:
                        taken[message.peer] = taken.get(message.peer, 0) + size_of(message.frames)
                        arrived.append((message.peer, items))
            except ValueError as error:
                self.reject(message.peer, error)
        for peer, nbytes in taken.items():
            self._port.send(Channel.CREDIT, peer, [encode_credit(nbytes)])
        self.pump()
        return arrived

    def reject(self, peer: bytes, error: ValueError) -> None:
        """Count a message that makes no sense, and log the first few."""
        self.bad_messages += 1
        if self.bad_messages <= _LOGGED_ERRORS:
            _log.warning("dropped a message from %s: %s", peer.decode(errors="replace"), error)

    def _credited(self, message: Message, now: float) -> None:
        if len(message.frames) != 1:
            raise WireError(f"a credit of {len(message.frames)} frames")
        nbytes = decode_credit(message.frames[0])
        if nbytes:
            self._window.credited(message.peer, nbytes, now)
        else:
            self._greet(message, [encode_credit(0)])

    def _items(self, message: Message) -> List[Item]:
        items = decode(message.frames)
        if not items:
            self._greet(message, GREETING)
        return items

    def _greet(self, message: Message, answer: List[bytes] | Tuple[bytes]) -> None:
        """Answer the first greeting of a connection; the connecting side gets it back."""
        if (message.channel, message.peer) not in self.greeted:
            self.greeted.add((message.channel, message.peer))
            self._port.send(message.channel, message.peer, answer)

    def __repr__(self) -> str:
        return f"<Exchange {self._outbox!r}, {self.bad_messages} bad messages>"
