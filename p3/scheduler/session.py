"""What a client of the scheduler knows and waits for; no socket, no thread of its own.

The control thread puts in what arrives (``note``), any thread waits.  All state is under one
condition, held for moments only; futures are completed outside it, on the thread that
brought the news.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from p3.config import SCHEDULER
from p3.errors import P3Error, PeerError, UsageError
from p3.scheduler.answers import Welcome, read_welcome
from p3.scheduler.messages import Body, Malformed, get_int, get_str

Convert = Callable[[Body, bytes], Any]


class _Request(NamedTuple):
    """A request that awaits its reply."""

    future: concurrent.futures.Future[Any]
    convert: Convert  #: makes the future's result of the reply


class Session:
    """One client's conversation with the scheduler at ``address``."""

    def __init__(self, address: str) -> None:
        self.welcome: Optional[Welcome] = None
        self.missing: Optional[str] = None  #: who, at the start; None: never told
        self._address = address
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._pending: Dict[int, _Request] = {}
        self._ended: Optional[Callable[[], P3Error]] = None
        self._bye = False

    @property
    def over(self) -> bool:
        """Whether nothing more is expected: the job failed, or we left."""
        return self._ended is not None

    @property
    def reached(self) -> bool:
        """Whether the scheduler has ever answered."""
        return self.missing is not None or self.welcome is not None

    def open(self, convert: Convert) -> Tuple[int, concurrent.futures.Future[Any]]:
        """A new request's number and future, which ``convert(body, blob)`` will fill.

        The future has failed already if the conversation is over.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it
        req = next(self._numbers)
        with self._changed:
            ended = self._ended
            if ended is None:
                self._pending[req] = _Request(future, convert)
        if ended is not None:
            future.set_exception(ended())
        return req, future

    def end(self, error: Callable[[], P3Error]) -> bool:
        """From now on everything raises ``error()``; ``False`` if it was over already."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = error
            pending, self._pending = self._pending, {}
            self._changed.notify_all()
        for request in pending.values():
            request.future.set_exception(error())
        return True

    def note(self, kind: str, body: Body, blob: bytes) -> bool:
        """Take in what arrived; ``False`` if it is an event or a command.  May raise Malformed."""
        if kind == "reply":
            self._resolve(body, blob)
        elif kind == "waiting":
            self.missing = get_str(body, "missing")
        elif kind == "welcome":
            with self._changed:
                self.welcome = read_welcome(body)
                self._changed.notify_all()
        elif kind == "refused":
            reason = f"refused by the scheduler at {self._address}: {get_str(body, 'reason')}"
            self.end(lambda: UsageError(reason))
        elif kind == "bye":
            with self._changed:
                self._bye = True
                self._changed.notify_all()
            self.end(lambda: UsageError("this process has left the job"))
        else:
            return kind == "heartbeat"
        return True

    def wait_welcome(self, timeout_s: float) -> Welcome:
        """See ``ControlClient.wait_welcome``."""
        with self._changed:
            self._changed.wait_for(lambda: self.welcome or self._ended, timeout_s)
            if self._ended is not None:
                raise self._ended()
            if self.welcome is not None:
                return self.welcome
        if self.missing is None:
            raise PeerError(
                f"no answer from the scheduler at {self._address} within {timeout_s:g} s: is it"
                " running there, can it be reached, and is P3_SECRET the same?",
                SCHEDULER,
            )
        raise PeerError(
            f"the job did not start within {timeout_s:g} s: the scheduler at {self._address}"
            f" still misses {self.missing}"
        )

    def wait_bye(self, timeout_s: float) -> None:
        """Wait for the scheduler's goodbye.  Raises ``PeerError`` if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout_s)
            if self._bye:
                return
            if self._ended is not None:
                raise self._ended()
        raise PeerError(
            f"no goodbye from the scheduler at {self._address} within {timeout_s:g} s", SCHEDULER
        )

    def wait_heard(self, timeout_s: float) -> None:
        """Wait until the scheduler has answered our failure, at best effort."""
        with self._changed:
            self._changed.wait_for(lambda: self._bye, timeout_s)

    def _resolve(self, body: Body, blob: bytes) -> None:
        with self._changed:
            request = self._pending.pop(get_int(body, "req"), None)
        if request is None:
            return  # the conversation is over
        try:
            if body.get("error") is not None:
                kind = UsageError if body.get("fault") == "usage" else PeerError
                raise kind(get_str(body, "error"))
            result = request.convert(body, blob)
        except (P3Error, Malformed) as error:
            request.future.set_exception(error)
        else:
            request.future.set_result(result)
