"""A worker's or server's line to the scheduler: ``ControlClient``.

Who owns what: one daemon thread, the control thread, owns the port from ``start`` to
``close``, and calls ``on_event``, ``on_command`` and the callbacks of futures.  What was
learnt is in a ``Session``, under a lock of its own; what is to be sent is in a deque.  Any
thread may call the public methods; those that block refuse to on the control thread.

What is promised:
- requests leave in the order of the calls, and what the scheduler sends is delivered in
  the order in which it sent it;
- every blocking call ends, and every future is done, when the job fails, when the scheduler
  falls silent, and when the client is closed: then with an error that says which;
- nothing is sent twice.  A request that failed so may have been carried out all the same.

What is assumed: the callbacks return soon, as heartbeats wait for them.  After a fork the
client is inert in the child: its calls do nothing, or raise ``UsageError`` if they would
have to return something.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import os
import threading
import time
from typing import Any, Callable, Deque, List, Optional, Sequence, Tuple

from p3.config import SCHEDULER, SERVER, Settings
from p3.errors import InternalError, P3Error, PeerError, UsageError
from p3.scheduler.answers import (
    Event,
    KeyFailed,
    Left,
    Order,
    PeerFailed,
    Registration,
    ServerInfo,
    Stop,
    Welcome,
    WorkerInfo,
    read_event,
)
from p3.scheduler.liveness import Liveness
from p3.scheduler.messages import (
    Body,
    Key,
    Malformed,
    decode,
    encode,
    get_dict,
    get_dicts,
    get_int,
    get_sizes,
    get_str,
    new_token,
    split_blobs,
)
from p3.scheduler.session import Convert, Session
from p3.slicing import KeyEntry
from p3.transport import Channel, Message, Port

__all__ = [
    "ControlClient",
    "Event",
    "KeyEntry",
    "KeyFailed",
    "Left",
    "Order",
    "PeerFailed",
    "Registration",
    "ServerInfo",
    "Stop",
    "Welcome",
    "WorkerInfo",
]

Answers = List[Tuple[Body, bytes]]  #: each server's body and blob, by rank
OnEvent = Callable[[Event], None]
OnCommand = Callable[[int, str, Body, bytes, int], None]  #: req, name, body, blob, from_rank

_log = logging.getLogger(__name__)
_SCHEDULER = b"scheduler"
_LINGER_S = 1.0  #: how long ``close`` waits for what was sent last
_FLUSH_S = 2.0  #: how long ``fail`` waits for the scheduler to have heard it
_STATUS_S = 1.0  #: how long a late barrier waits to learn who is missing


class ControlClient:
    """See the module's text for threads and promises."""

    def __init__(
        self,
        port: Port,
        address: str,
        settings: Settings,
        registration: Registration,
        on_event: OnEvent,
        on_command: OnCommand,
    ) -> None:
        self._port = port
        self._address = address
        self._settings = settings
        self._me = registration
        self._on_event = on_event
        self._on_command = on_command
        self._pid = os.getpid()
        self._session = Session(address)
        self._outbox: Deque[List[bytes]] = collections.deque()
        self._closing = False
        self._liveness = Liveness(settings.heartbeat_timeout_s)
        self._beat_at = float("inf")  # no heartbeats before the scheduler was heard
        self._thread = threading.Thread(target=self._run, name="p3-control", daemon=True)

    # ---- for everybody

    def start(self) -> None:
        """Connect and register, on the control thread.  Returns at once."""
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> Welcome:
        """Wait until all roles of the job are there; return this process's part in it.

        Raises ``UsageError`` if the scheduler refuses this process, and ``PeerError`` if the
        job fails or somebody, whom it names, is still missing after ``timeout_s``.
        """
        self._may_block()
        return self._session.wait_welcome(timeout_s)

    def goodbye(self, timeout_s: float) -> None:
        """Leave the job in peace; blocks until the scheduler knows.  Call ``close`` next.

        Raises ``PeerError`` if the job has failed or the scheduler does not answer.
        """
        if self._inert:
            return
        self._may_block()
        self._post({"kind": "goodbye"})
        self._session.wait_bye(timeout_s)

    def fail(self, reason: str) -> None:
        """Tell everybody that this process ends because of an error (at best effort).

        Blocks until the scheduler knows, for 2 s at most.  Pending requests fail.
        """
        if self._inert:
            return
        reached = self._session.reached
        if not self._session.end(self._own_failure(reason).error):
            return  # everybody knows already that the job has ended
        self._post({"kind": "fail", "reason": reason})
        if reached and threading.current_thread() is not self._thread:
            self._session.wait_heard(_FLUSH_S)

    def close(self) -> None:
        """End the control thread and close the port.  Safe to call more than once."""
        if self._inert:
            return
        self._closing = True
        if self._thread.ident is None:
            self._port.close()
        else:
            self._port.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._session.end(lambda: UsageError("this process has closed its control connection"))

    # ---- for workers

    def ask(self, name: str, body: Body, blob: bytes = b"") -> concurrent.futures.Future[Answers]:
        """Send a command to every server; the future holds their answers by rank.

        It raises ``PeerError`` if a server answers with an error.  ``body`` must be plain
        JSON data (else ``TypeError``, here).
        """
        return self._request({"kind": "ask", "name": name, "body": body}, _answers, blob)

    def declare(
        self, space: int, key: Key, shape: Sequence[int], dtype: str, mode: str, whole: bool
    ) -> concurrent.futures.Future[KeyEntry]:
        """Get a key's number and place, the same on all ranks; done when all servers know it.

        The future raises ``PeerError`` if ranks disagree on the key or a server refuses it,
        ``UsageError`` if nobody could store such a key.  A disagreement that comes to light
        later is a ``KeyFailed`` event.
        """
        plain = tuple(int(size) for size in shape)

        def entry(body: Body, blob: bytes) -> KeyEntry:
            number, first = get_int(body, "id"), get_int(body, "first")
            return KeyEntry(number, space, key, plain, dtype, mode, whole, first)

        spec = {"shape": plain, "dtype": dtype, "mode": mode, "whole": whole}
        return self._request({"kind": "declare", "space": space, "key": key, **spec}, entry)

    def barrier(self, timeout_s: Optional[float] = None) -> None:
        """Wait until every worker that is still there has called this (``None``: for ever).

        Raises ``PeerError`` if one has ended instead, if the job fails, and if the time is
        over, naming who is missing; this rank still counts as having come.
        """
        self._may_block()
        future = self._request({"kind": "barrier"}, lambda body, blob: None)
        concurrent.futures.wait([future], timeout_s)
        if not future.done():
            raise PeerError(f"barrier: waited {timeout_s:g} s{self._who_is_late()}")
        future.result()

    def order(self, space: int, keys: Sequence[Key]) -> None:
        """Tell all workers the order in which the forward pass uses keys (rank 0 does)."""
        self._post({"kind": "order", "space": space, "keys": list(keys)})

    def fail_key(self, space: int, key: Key, reason: str) -> None:
        """Tell all workers that nobody can use ``key`` any more.  Returns at once."""
        self._post({"kind": "fail_key", "space": space, "key": key, "reason": reason})

    # ---- for servers

    def ready(self) -> None:
        """The workers' tokens are admitted: they may connect."""
        self._post({"kind": "ready"})

    def reply(self, req: int, body: Body, blob: bytes = b"", error: Optional[str] = None) -> None:
        """Answer the command ``req``, once, from any thread, at any time."""
        self._post({"kind": "reply", "req": req, "body": body, "error": error}, blob)

    # ---- any thread

    @property
    def _inert(self) -> bool:
        return os.getpid() != self._pid

    def _may_block(self) -> None:
        if self._inert:
            raise UsageError(
                f"the connection to the scheduler belongs to process {self._pid}, from which"
                " this one was forked; use the store in the process that created it"
            )
        if threading.current_thread() is self._thread:
            raise InternalError("a blocking call on the control thread, which it would wait for")

    def _post(self, body: Body, blob: bytes = b"") -> None:
        if self._inert:
            return
        self._outbox.append(encode(body, blob))
        self._port.wake()

    def _request(
        self, body: Body, convert: Convert, blob: bytes = b""
    ) -> concurrent.futures.Future[Any]:
        if self._inert:
            self._may_block()  # raises
        encode(body)  # raises before anything is noted
        req, future = self._session.open(convert)
        if not future.done():
            self._post({**body, "req": req}, blob)
        return future

    def _who_is_late(self) -> str:
        status = self._request({"kind": "status"}, lambda body, blob: get_dict(body, "status"))
        try:
            barrier = status.result(_STATUS_S)["barrier"]
        except (P3Error, concurrent.futures.TimeoutError):
            return ""
        return f": ranks {barrier['waiting']} wait for ranks {barrier['absent']}"

    def _own_failure(self, reason: str) -> PeerFailed:
        welcome = self._session.welcome
        rank = self._me.worker_id if welcome is None else welcome.rank
        return PeerFailed(self._me.role, rank, self._me.host, reason)

    # ---- the control thread

    def _run(self) -> None:
        try:
            self._port.connect(Channel.CONTROL, _SCHEDULER, self._address, new_token())
            self._send(self._register())
            while not self._closing:
                self._flush()
                for message in self._port.recv(self._settings.heartbeat_timeout_s / 10):
                    self._take(message)
                self._beat()
            self._flush()
        except Exception as error:  # noqa: BLE001  (from a callback: anything)
            self._broken(error)
        finally:
            self._port.close(_LINGER_S)

    def _register(self) -> Body:
        me = self._me
        return {
            "kind": "register",
            "role": me.role,
            "worker_id": me.worker_id,
            "host": me.host,
            "pid": me.pid,
            "addresses": {"data": me.data, "credit": me.credit} if me.role == SERVER else {},
            "agreed": self._settings.agreed(),
            "version": me.version,
        }

    def _send(self, body: Body) -> None:
        self._port.send(Channel.CONTROL, _SCHEDULER, encode(body))

    def _flush(self) -> None:
        while self._outbox:
            self._port.send(Channel.CONTROL, _SCHEDULER, self._outbox.popleft())

    def _beat(self) -> None:
        """Send a heartbeat if it is time, and see whether the scheduler still lives."""
        now = time.monotonic()
        if self._session.over:
            return
        if now >= self._beat_at:
            self._beat_at = now + self._settings.heartbeat_timeout_s / 5
            self._send({"kind": "heartbeat"})
        if self._liveness.silent(now):
            reason = f"not heard at {self._address} for {self._settings.heartbeat_timeout_s:g} s"
            self._failed(PeerFailed(SCHEDULER, None, self._settings.root_host, reason))

    def _take(self, message: Message) -> None:
        now = time.monotonic()
        self._liveness.heard(_SCHEDULER, now)
        self._beat_at = min(self._beat_at, now + self._settings.heartbeat_timeout_s / 5)
        try:
            body, blob = decode(message.frames)
            kind = get_str(body, "kind")
            if kind == "command":
                self._command(body, blob)
            elif not self._session.note(kind, body, blob):
                self._event(read_event(body))
        except Malformed as error:
            _log.warning("dropped a message of the scheduler: %s", error)

    def _event(self, event: Event) -> None:
        if isinstance(event, PeerFailed):
            self._failed(event)
        else:
            self._on_event(event)

    def _failed(self, event: PeerFailed) -> None:
        if self._session.end(event.error):
            self._on_event(event)

    def _command(self, body: Body, blob: bytes) -> None:
        req, name, rank = get_int(body, "req"), get_str(body, "name"), get_int(body, "from_rank")
        try:
            self._on_command(req, name, get_dict(body, "body"), blob, rank)
        except Exception as error:  # noqa: BLE001  (told to who asked)
            _log.exception("command %s from rank %d", name, rank)
            self.reply(req, {}, error=f"{name}: {type(error).__name__}: {error}")

    def _broken(self, error: Exception) -> None:
        """A callback or the port raised: nobody would notice, so it ends the job."""
        _log.error("the control thread ended", exc_info=error)
        reason = f"its control thread ended: {type(error).__name__}: {error}"
        self._send({"kind": "fail", "reason": reason})
        try:
            self._failed(self._own_failure(reason))
        except Exception:  # noqa: BLE001  (the same callback, perhaps)
            _log.exception("on_event, told of the failure")


def _answers(body: Body, blob: bytes) -> Answers:
    blobs = split_blobs(get_sizes(body, "sizes_bytes"), blob)
    return list(zip(get_dicts(body, "bodies"), blobs))
