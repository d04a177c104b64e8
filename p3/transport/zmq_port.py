"""``Port`` over ZeroMQ: one ROUTER for each channel listened on, one DEALER a connection.

A DEALER's routing id is its token, so a ROUTER learns with every message whose it is, and
admission is one dictionary look-up.  High-water marks are off: credit bounds what is in
flight.  CONTROL always runs under CURVE; DATA and CREDIT do when ``encrypt`` is set.

One thread owns the port and calls everything but ``wake``.  ``wake`` writes a byte to a
pipe that ``recv`` polls with the sockets; wakes that pile up cost one byte together.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import zmq
import zmq.auth.thread
import zmq.backend

from p3.errors import UsageError
from p3.transport import curve
from p3.transport.interface import Buffer, Channel, Message

#: messages taken from one socket before the others get their turn
_BATCH = 64
#: frames from this size on may be sent without a copy; below, pyzmq's bookkeeping costs more
_LARGE_BYTES = 65_536
# pyzmq's compiled calls and plain numbers: its Python layer took longer than the call itself
_send: Any = zmq.backend.Socket.send
_recv: Any = zmq.backend.Socket.recv
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)


class ZmqPort:
    """See ``Port`` for the calls and the promises."""

    def __init__(self, keys: curve.CurveKeys, encrypt: bool = False) -> None:
        self.dropped = 0
        self._keys = keys
        self._curved = {Channel.CONTROL: True, Channel.DATA: encrypt, Channel.CREDIT: encrypt}
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator: Optional[zmq.auth.thread.ThreadAuthenticator] = None
        self._poller = zmq.Poller()
        self._listeners: Dict[Channel, Any] = {}
        self._connections: Dict[Tuple[Channel, bytes], Any] = {}
        self._sources: Dict[Any, Tuple[Channel, Optional[bytes]]] = {}
        self._peers: Dict[bytes, bytes] = {}  # token -> peer
        self._tokens: Dict[bytes, bytes] = {}  # peer -> token
        self._awake = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def listen(self, channel: Channel, host: str, port: int = 0) -> str:
        """See ``Port.listen``."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curved[channel]:
            if self._authenticator is None:
                self._authenticator = curve.start_authenticator(self._context, self._keys)
            socket.curve_secretkey = self._keys.server_secret
            socket.curve_publickey = self._keys.server_public
            socket.curve_server = True
        try:
            socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(f"cannot listen on {host}:{port or '(any port)'}: {error}") from None
        self._listeners[channel] = socket
        self._watch(socket, channel, None)
        address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return address

    def connect(self, channel: Channel, peer: bytes, address: str, token: bytes) -> None:
        """See ``Port.connect``."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, token)
        if self._curved[channel]:
            socket.curve_secretkey = self._keys.client_secret
            socket.curve_publickey = self._keys.client_public
            socket.curve_serverkey = self._keys.server_public
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise UsageError(f"cannot connect to {address}: {error}") from None
        self._connections[channel, peer] = socket
        self._watch(socket, channel, peer)

    def admit(self, token: bytes, peer: bytes) -> None:
        """See ``Port.admit``."""
        self._peers[token] = peer
        self._tokens[peer] = token

    def send(
        self, channel: Channel, peer: bytes, frames: Sequence[Buffer], copy: bool = True
    ) -> bool:
        """See ``Port.send``."""
        socket = self._connections.get((channel, peer))
        try:
            if socket is None:
                socket = self._listeners[channel]
                token = peer if channel is Channel.CONTROL else self._tokens[peer]
                _send(socket, token, _NOBLOCK | _SNDMORE, True)
            for frame in frames[:-1]:
                _send(socket, frame, _NOBLOCK | _SNDMORE, copy or len(frame) < _LARGE_BYTES)
            _send(socket, frames[-1], _NOBLOCK, copy or len(frames[-1]) < _LARGE_BYTES)
        except (zmq.Again, KeyError):
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def recv(self, timeout_s: Optional[float]) -> List[Message]:
        """See ``Port.recv``."""
        messages: List[Message] = []
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        for source, _ in self._poller.poll(timeout_ms):
            if source == self._wake_read:
                # cleared after reading: a wake in between is seen by the caller's next look,
                # but cleared before, its byte would be read and the flag stay set for ever
                os.read(self._wake_read, 4096)
                self._awake = False
            else:
                self._drain(source, messages)
        return messages

    def wake(self) -> None:
        """See ``Port.wake``."""
        if not self._awake:
            self._awake = True
            try:
                os.write(self._wake_write, b"\0")
            except OSError:  # full, so it is awake anyway; or closed, so nobody sleeps
                pass

    def close(self, linger_s: float = 0.0) -> None:
        """See ``Port.close``."""
        if self._context.closed:
            return
        for socket in self._sources:
            socket.close(linger=int(linger_s * 1000))
        self._sources.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.linger = 0
        socket.ipv6 = True
        socket.setsockopt(zmq.MAXMSGSIZE, -1)
        return socket

    def _watch(self, socket: Any, channel: Channel, peer: Optional[bytes]) -> None:
        self._sources[socket] = (channel, peer)
        self._poller.register(socket, zmq.POLLIN)

    def _drain(self, socket: Any, messages: List[Message]) -> None:
        """Take what has arrived on ``socket``, up to a batch, dropping strangers' messages."""
        channel, peer = self._sources[socket]
        try:
            for _ in range(_BATCH):
                frames = _receive(socket)
                if peer is not None:
                    messages.append(Message(channel, peer, frames))
                    continue
                token = bytes(frames.pop(0))
                sender = token if channel is Channel.CONTROL else self._peers.get(token)
                if sender is None:
                    self.dropped += 1
                else:
                    messages.append(Message(channel, sender, frames))
        except zmq.Again:
            return


def _receive(socket: Any) -> List[Any]:
    """One message's frames, uncopied; raises ``zmq.Again`` if there is none."""
    frame = _recv(socket, _NOBLOCK, False)
    frames = [frame.buffer]
    while frame.more:
        frame = _recv(socket, _NOBLOCK, False)
        frames.append(frame.buffer)
    return frames


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
