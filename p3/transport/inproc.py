"""``Port`` inside one process: the twin of the ZeroMQ one, for embedded jobs and tests.

Ports of one ``InprocNetwork`` find each other by address.  Each has an inbox, a deque under
a condition; ``send`` appends to the receiver's inbox and wakes its owner.  Frames sent with
``copy=False`` are handed over as they are, others are copied, as a socket would.
"""

from __future__ import annotations

import collections
import itertools
import threading
from typing import Deque, Dict, List, Optional, Sequence, Tuple

from p3.errors import UsageError
from p3.transport.interface import Buffer, Channel, Message


class InprocNetwork:
    """The addresses of one process's ports.  Safe to use from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listeners: Dict[str, Tuple[InprocPort, Channel]] = {}
        self._numbers = itertools.count(1)

    def new_address(self, port: int) -> str:
        """An address nobody listens on; raises ``UsageError`` if ``port`` is taken."""
        address = f"inproc://{port or next(self._numbers) + 65535}"
        if address in self.listeners:
            raise UsageError(f"cannot listen on {address}: it is taken")
        return address


class InprocPort:
    """See ``Port`` for the calls and the promises."""

    def __init__(self, network: InprocNetwork) -> None:
        self.dropped = 0
        self._network = network
        self._inbox: Deque[Message] = collections.deque()
        self._ready = threading.Condition()
        self._awake = False
        self._closed = False
        self._addresses: Dict[str, Channel] = {}
        # (channel, peer) -> (address, token) of connections that we opened
        self._outgoing: Dict[Tuple[Channel, bytes], Tuple[str, bytes]] = {}
        # messages sent before their listener was there, as (channel, peer, frames)
        self._early: List[Tuple[Channel, bytes, List[Buffer]]] = []
        self._peers: Dict[bytes, bytes] = {}
        self._tokens: Dict[bytes, bytes] = {}
        # (channel, token) -> (the port that connected, its name for us)
        self._incoming: Dict[Tuple[Channel, bytes], Tuple[InprocPort, bytes]] = {}

    def listen(self, channel: Channel, host: str, port: int = 0) -> str:
        """See ``Port.listen``."""
        with self._network.lock:
            address = self._network.new_address(port)
            self._network.listeners[address] = (self, channel)
        self._addresses[address] = channel
        return address

    def connect(self, channel: Channel, peer: bytes, address: str, token: bytes) -> None:
        """See ``Port.connect``."""
        self._outgoing[channel, peer] = (address, token)

    def admit(self, token: bytes, peer: bytes) -> None:
        """See ``Port.admit``."""
        self._peers[token] = peer
        self._tokens[peer] = token

    def send(
        self, channel: Channel, peer: bytes, frames: Sequence[Buffer], copy: bool = True
    ) -> bool:
        """See ``Port.send``."""
        parts: List[Buffer] = [bytes(frame) for frame in frames] if copy else list(frames)
        if (channel, peer) in self._outgoing:
            self._flush()
            if self._early or not self._deliver(channel, peer, parts):
                self._early.append((channel, peer, parts))
            return True
        token = peer if channel is Channel.CONTROL else self._tokens.get(peer, b"")
        target = self._incoming.get((channel, token))
        return target is not None and target[0].put(Message(channel, target[1], parts))

    def recv(self, timeout_s: Optional[float]) -> List[Message]:
        """See ``Port.recv``."""
        self._flush()
        if self._early:  # a listener is awaited: look for it again soon
            timeout_s = 0.005 if timeout_s is None else min(timeout_s, 0.005)
        with self._ready:
            self._ready.wait_for(lambda: self._inbox or self._awake, timeout_s)
            self._awake = False
            arrived = list(self._inbox)
            self._inbox.clear()
        return [message for message in map(self._admitted, arrived) if message is not None]

    def wake(self) -> None:
        """See ``Port.wake``."""
        with self._ready:
            self._awake = True
            self._ready.notify_all()

    def close(self, linger_s: float = 0.0) -> None:
        """See ``Port.close``."""
        self._closed = True
        with self._network.lock:
            for address in self._addresses:
                self._network.listeners.pop(address, None)

    def put(self, message: Message) -> bool:
        """Append to the inbox, from the sender's thread; ``False`` if this port is closed."""
        if self._closed:
            return False
        with self._ready:
            self._inbox.append(message)
            self._ready.notify_all()
        return True

    def _flush(self) -> None:
        while self._early and self._deliver(*self._early[0]):
            self._early.pop(0)

    def _deliver(self, channel: Channel, peer: bytes, frames: List[Buffer]) -> bool:
        """Hand a message of a connection that we opened to its listener, if there is one."""
        address, token = self._outgoing[channel, peer]
        with self._network.lock:
            listener, listening = self._network.listeners.get(address, (None, channel))
        if listener is None or listening is not channel:
            return False
        listener._incoming[channel, token] = (self, peer)
        return listener.put(Message(channel, b"\0" + token, frames))

    def _admitted(self, message: Message) -> Optional[Message]:
        """The message with its token replaced by the peer's name; ``None`` for a stranger's."""
        if not message.peer.startswith(b"\0"):
            return message  # from a listener that we connected to
        token = message.peer[1:]
        peer = token if message.channel is Channel.CONTROL else self._peers.get(token)
        if peer is None:
            self.dropped += 1
            return None
        return message._replace(peer=peer)
