"""What p3 asks of a transport: ``Port``, one node's end of all its connections.

A node (worker, server, scheduler) owns ports; a port carries up to three channels,
each on connections of its own, so that none waits behind another:

    CONTROL   scheduler <-> everybody   registration, keys, barriers, failures
    DATA      worker <-> server         slices of gradients and weights
    CREDIT    worker <-> server         "I have taken N bytes"; never waits behind DATA

Promised by every implementation, and held to it by one conformance suite:

- messages between two ports on one channel arrive whole, once, in order, or not at all;
- ``send`` never blocks: bytes in flight are bounded by credit, not by the transport;
- ``recv`` is the only call that waits, and ``wake``, from any thread, ends the wait;
- a message on DATA or CREDIT from a peer that was not admitted by its token is dropped
  and counted, and nothing else happens;
- everything but ``wake`` is called by the one thread that owns the port.

With ``copy=False`` the transport may read the given memory until the receiver has got the
message; the caller must leave it unchanged until the peer has answered in some way.
"""

from __future__ import annotations

import enum
from typing import Any, List, NamedTuple, Optional, Protocol, Sequence, Union

Buffer = Union[bytes, bytearray, memoryview]


class Channel(enum.IntEnum):
    """The three kinds of connection."""

    CONTROL = 0
    DATA = 1
    CREDIT = 2


class Message(NamedTuple):
    """One message: ``frames`` are read-only memory, valid while they are referenced."""

    channel: Channel
    peer: bytes
    frames: List[Any]  # each bytes or memoryview


class Port(Protocol):
    """One node's end of its connections; see the module's text for the promises."""

    dropped: int  # messages refused because their sender was not admitted

    def listen(self, channel: Channel, host: str, port: int = 0) -> str:
        """Accept connections; return the address for ``connect`` (``port`` 0: any free one).

        Raises ``UsageError`` if the address cannot be bound.
        """

    def connect(self, channel: Channel, peer: bytes, address: str, token: bytes) -> None:
        """Open a connection to the listener at ``address``, to be called ``peer`` here.

        Returns at once; a listener that comes up later is found later.  ``token``
        (1 to 64 bytes, not starting with a zero byte) is what that listener admits us by.
        """

    def admit(self, token: bytes, peer: bytes) -> None:
        """From now on messages under ``token`` on DATA and CREDIT are ``peer``'s.

        On CONTROL every token is admitted, as the peer has proved that it knows the
        job's secret; there the token itself is the peer's name.
        """

    def send(
        self, channel: Channel, peer: bytes, frames: Sequence[Buffer], copy: bool = True
    ) -> bool:
        """Send one message; ``False`` if ``peer`` has no connection (yet, or any more)."""

    def recv(self, timeout_s: Optional[float]) -> List[Message]:
        """Wait for messages (``None``: for ever); an empty list after a timeout or ``wake``."""

    def wake(self) -> None:
        """End the current or the next ``recv``; the only call open to any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections; ``linger_s``: how long messages already sent may take."""
