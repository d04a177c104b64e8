"""The scheduler as a process, or as a thread of an embedded job.

One thread owns the port and the state machine: it receives, lets the state decide, sends.
The state is asked to let time pass whenever nothing has arrived for a moment, and at least
once in that moment, so silence is never judged before what has arrived was read.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from typing import Callable, Iterator, List, Optional

from p3.config import Settings
from p3.errors import UsageError
from p3.scheduler.messages import VERSION, Malformed, Send, decode, encode
from p3.scheduler.state import SchedulerState
from p3.transport import Channel, Port

#: how long the last messages may take to get out
_LINGER_S = 2.0


class StopFlag:
    """Ends a running ``serve_on`` from any thread or from a signal handler."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.reason: Optional[str] = None

    def stop(self, reason: str) -> None:
        """Fail the job, telling everybody why.  Safe to call more than once."""
        self.reason = reason
        self._port.wake()


def serve(settings: Settings, version: str = VERSION) -> int:
    """Be the scheduler of a job until it ends; return the exit code.

    Listens on ``root_host:root_port``; raises ``UsageError`` if it cannot.  To be called on
    the main thread, as SIGTERM and SIGINT then fail the job instead of ending the process.
    """
    from p3.transport.curve import derive
    from p3.transport.zmq_port import ZmqPort

    port = ZmqPort(derive(settings.secret), settings.encrypt)
    try:
        port.listen(Channel.CONTROL, _numeric(settings.root_host), settings.root_port)
        flag = StopFlag(port)
        with _signals_stop(flag):
            return serve_on(port, settings, version, flag)
    finally:
        port.close()


def serve_on(
    port: Port,
    settings: Settings,
    version: str = VERSION,
    flag: Optional[StopFlag] = None,
    say: Optional[Callable[[str], None]] = None,
) -> int:
    """Be the scheduler on a port that listens on CONTROL already; return the exit code.

    Blocks until the job has ended, owns the port meanwhile, and closes it.  ``say`` gets the
    line that tells why the job failed (default: to stderr).
    """
    state = SchedulerState(settings, time.monotonic(), version=version)
    pause_s = min(1.0, settings.heartbeat_timeout_s / 10)
    try:
        ticked = time.monotonic()
        while state.exit_code is None:
            arrived = port.recv(pause_s)
            now = time.monotonic()
            for message in arrived:
                _take(port, state, message.peer, message.frames, now)
            if flag is not None and flag.reason is not None:
                _send(port, state.stop(flag.reason))
            if not arrived or now - ticked >= pause_s:
                ticked = now
                _send(port, state.tick(now))
    except BaseException as error:
        _send(port, state.stop(f"the scheduler failed: {type(error).__name__}: {error}"))
        raise
    finally:
        port.close(_LINGER_S)
    if state.failure:
        (say or _say)(f"p3 scheduler: {state.failure}")
    return state.exit_code


def _take(port: Port, state: SchedulerState, peer: bytes, frames: List[object], now: float) -> None:
    try:
        body, blob = decode(frames)
    except Malformed as error:
        state.drop(peer, str(error), now)
        return
    _send(port, state.handle(peer, body, blob, now))


def _send(port: Port, sends: List[Send]) -> None:
    """Send in order.  A peer that has no connection any more will be missed as silent."""
    for send in sends:
        port.send(Channel.CONTROL, send.peer, encode(send.body, send.blob))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numeric(host: str) -> str:
    """The IP address of ``host``, as sockets are bound to addresses, not to names."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"DMLC_PS_ROOT_URI={host}: cannot be resolved on the scheduler's machine ({error})"
        ) from None


@contextlib.contextmanager
def _signals_stop(flag: StopFlag) -> Iterator[None]:
    """SIGTERM and SIGINT fail the job while this is open (on the main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        flag.stop("the scheduler was stopped")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
