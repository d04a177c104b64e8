"""The scheduler's state machine: one message or one tick in, messages to send out.

Pure: no socket, no thread, no clock (``now`` is passed in, seconds of any monotonic clock).
It belongs to whoever calls it, one thread at a time.

    WAITING    everybody registers; a client that falls silent frees its place
    STARTING   ranks are given; the servers are told the workers' tokens and get ready
    RUNNING    the workers are welcome and ask (requests.py)
    STOPPING   all workers have said goodbye; the servers are told to stop
    ENDED      ``exit_code`` is set; the last messages are in the list just returned

From STARTING on, the job fails as a whole: whoever falls silent, says that it failed, or
leaves at the wrong time is named to all the others, and the exit code is 1.  A message that
makes no sense is dropped, counted and logged, and changes nothing else.
"""

from __future__ import annotations

import enum
import logging
from typing import Any, Callable, Dict, List, Optional

from p3.config import SERVER, WORKER, Settings
from p3.scheduler.liveness import Liveness
from p3.scheduler.members import Member, Roster, count, ranks
from p3.scheduler.messages import VERSION, Body, Malformed, Send, get_str, new_token, shown
from p3.scheduler.requests import Handler, Requests

_log = logging.getLogger(__name__)

#: at most one line about dropped messages in this time
_LOG_INTERVAL_S = 5.0


class Phase(enum.Enum):
    """See the module's text."""

    WAITING = "waiting for everybody to register"
    STARTING = "waiting for the servers to be ready"
    RUNNING = "running"
    STOPPING = "waiting for the servers to stop"
    ENDED = "ended"


class SchedulerState:
    """One job.  ``exit_code`` is ``None`` until it has ended."""

    def __init__(
        self,
        settings: Settings,
        now: float,
        token_factory: Callable[[], bytes] = new_token,
        version: str = VERSION,
    ) -> None:
        self.exit_code: Optional[int] = None
        self.failure: Optional[str] = None  #: why the job failed, on one line
        self.dropped = 0  #: messages that made no sense
        self._settings = settings
        self._now = self._began = self._stopping_since = now
        self._phase = Phase.WAITING
        self._new_token = token_factory
        self._roster = Roster(settings, version)
        self._liveness = Liveness(settings.heartbeat_timeout_s)
        self._requests = Requests(settings, self._roster)
        self._logged = float("-inf")
        self._handlers: Dict[str, Handler] = {
            "heartbeat": self._heartbeat,
            "ready": self._ready,
            "goodbye": self._goodbye,
            "fail": self._fail,
        }

    def handle(self, peer: bytes, body: Body, blob: bytes, now: float) -> List[Send]:
        """Take in one message; return what to send, in this order."""
        self._now = now
        try:
            kind = get_str(body, "kind")
            if kind == "register":
                return self._register(peer, body)
            member = self._roster.get(peer)
            if not member.gone:
                self._liveness.heard(peer, now)
            if self._phase is Phase.ENDED:
                return []
            return self._handler(kind, member)(member, body, blob)
        except Malformed as error:
            self.drop(peer, str(error), now)
            return []

    def tick(self, now: float) -> List[Send]:
        """Let time pass; to be called several times within the heartbeat's timeout."""
        self._now = now
        sends: List[Send] = []
        for peer in self._liveness.silent(now):
            sends += self._silent(self._roster.get(peer))
        starting = self._phase in (Phase.WAITING, Phase.STARTING)
        if starting and now - self._began > self._settings.start_timeout_s:
            return sends + self.stop(
                f"the job did not start within {self._settings.start_timeout_s:g} s"
                f" (P3_START_TIMEOUT_S): missing {self.missing()}"
            )
        stopping_s = now - self._stopping_since
        if self._phase is Phase.STOPPING and stopping_s > self._settings.heartbeat_timeout_s:
            self._end(0)
        return sends

    def stop(self, reason: str) -> List[Send]:
        """End the job from here, as failed, and tell everybody why."""
        if self._phase is Phase.ENDED:
            return []
        return self._failed("scheduler", None, self._settings.root_host, reason, None)

    def drop(self, peer: bytes, reason: str, now: float) -> None:
        """Count a message that makes no sense, and log it unless another was just logged."""
        self.dropped += 1
        if now - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            sender = self._roster.get(peer) if peer in self._roster else f"a stranger {peer.hex()}"
            _log.warning("dropped (%d so far): from %s: %s", self.dropped, sender, reason)

    def missing(self) -> str:
        """Who keeps the job from starting, as in ``1 worker (rank 1), 2 servers``."""
        if self._phase is Phase.STARTING:
            late = [server.rank for server in self._roster.servers if not server.ready]
            return f"{count(len(late), SERVER)} registered but not ready ({ranks(late)})"
        return self._roster.missing()

    def snapshot(self) -> Dict[str, Any]:
        """The state as plain values, for messages and logs."""
        return {
            "phase": self._phase.value,
            "missing": self.missing(),
            "members": [str(member) for member in self._roster.everybody if not member.gone],
            "gone": [str(member) for member in self._roster.everybody if member.gone],
            "dropped": self.dropped,
            "failure": self.failure,
            **self._requests.snapshot(),
        }

    def __repr__(self) -> str:
        return f"<SchedulerState {self.snapshot()}>"

    def _handler(self, kind: str, member: Member) -> Handler:
        if kind in self._handlers:
            return self._handlers[kind]
        if kind not in self._requests.handlers:
            raise Malformed(f"kind={shown(kind)}: unknown")
        if self._phase not in (Phase.RUNNING, Phase.STOPPING):
            raise Malformed(f"{kind} from {member} before its welcome")
        return self._requests.handlers[kind]

    # ---- the start

    def _register(self, peer: bytes, body: Body) -> List[Send]:
        if peer in self._roster:
            raise Malformed("registered twice")
        reason = self._roster.refusal(body)
        if self._phase is Phase.ENDED:
            reason = f"the job has ended{': ' + self.failure if self.failure else ''}"
        elif self._phase is not Phase.WAITING:
            reason = "the job has started with all its workers and servers; nobody can join it"
        if reason is not None:
            return [Send(peer, {"kind": "refused", "reason": reason})]
        self._roster.add(peer, body)
        self._liveness.heard(peer, self._now)
        return self._welcome_servers() if self._roster.complete else self._tell_missing()

    def _tell_missing(self) -> List[Send]:
        body = {"kind": "waiting", "missing": self.missing()}
        return [Send(member.peer, body) for member in self._roster.everybody]

    def _welcome_servers(self) -> List[Send]:
        self._phase = Phase.STARTING
        self._roster.give_ranks()
        for worker in self._roster.workers:
            worker.token = self._new_token()
        workers = [
            {"rank": worker.rank, "token": worker.token.hex(), "host": worker.host}
            for worker in self._roster.workers
        ]
        welcomes = [
            Send(server.peer, {**self._welcome(server), "workers": workers})
            for server in self._roster.servers
        ]
        return self._tell_missing() + welcomes

    def _ready(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        if member.role != SERVER or member.rank < 0 or member.ready:
            raise Malformed(f"ready from {member}, which was not asked")
        member.ready = True
        if self._phase is not Phase.STARTING:
            return []
        if not all(server.ready for server in self._roster.servers):
            return self._tell_missing()
        self._phase = Phase.RUNNING
        servers = [
            {"rank": server.rank, "data": server.data, "credit": server.credit, "host": server.host}
            for server in self._roster.servers
        ]
        return [
            Send(
                worker.peer,
                {**self._welcome(worker), "token": worker.token.hex(), "servers": servers},
            )
            for worker in self._roster.workers
            if not worker.gone
        ]

    def _welcome(self, member: Member) -> Body:
        return {
            "kind": "welcome",
            "rank": member.rank,
            "num_workers": self._settings.num_workers,
            "num_servers": self._settings.num_servers,
        }

    # ---- the end

    def _heartbeat(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        return [Send(member.peer, {"kind": "heartbeat"})]

    def _goodbye(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        bye = [Send(member.peer, {"kind": "bye"})]
        if member.gone:
            return bye
        self._liveness.forget(member.peer)
        if self._phase is Phase.WAITING:
            self._roster.remove(member.peer)
            return bye + self._tell_missing()
        if member.role == SERVER and self._phase is not Phase.STOPPING:
            return bye + self._member_failed(member, "it left before the workers were done")
        member.gone = True
        if member.role == WORKER:
            return bye + self._requests.worker_left(member) + self._tell_servers_of(member)
        self._end_if_servers_gone()
        return bye

    def _tell_servers_of(self, leaver: Member) -> List[Send]:
        """A worker has left; with the last one the servers are to stop."""
        if not all(worker.gone for worker in self._roster.workers):
            left = {"kind": "left", "rank": leaver.rank}
            return [Send(server.peer, left) for server in self._roster.servers]
        self._phase = Phase.STOPPING
        self._stopping_since = self._now
        return [Send(server.peer, {"kind": "stop"}) for server in self._roster.servers]

    def _silent(self, member: Member) -> List[Send]:
        self._liveness.forget(member.peer)
        if self._phase is Phase.ENDED:
            return []
        reason = (
            f"not heard for {self._settings.heartbeat_timeout_s:g} s (P3_HEARTBEAT_TIMEOUT_S):"
            " it was killed, it hangs, or the network is down"
        )
        if self._phase is Phase.WAITING:
            self._roster.remove(member.peer)
            return [Send(member.peer, {"kind": "refused", "reason": reason}), *self._tell_missing()]
        if self._phase is Phase.STOPPING:
            member.gone = True
            self._end_if_servers_gone()
            return []
        return self._member_failed(member, reason)

    def _fail(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        bye = [Send(member.peer, {"kind": "bye"})]
        return self._member_failed(member, get_str(body, "reason"), but=member.peer) + bye

    def _member_failed(
        self, member: Member, reason: str, but: Optional[bytes] = None
    ) -> List[Send]:
        rank = member.worker_id if member.rank < 0 else member.rank
        return self._failed(member.role, rank, member.host, reason, but)

    def _failed(
        self, role: str, rank: Optional[int], host: str, reason: str, but: Optional[bytes]
    ) -> List[Send]:
        """End the job and tell everybody who is there, except ``but``."""
        who = role if rank is None else f"{role} {rank}"
        self.failure = reason if role == "scheduler" else f"{who} (host {host}): {reason}"
        self._end(1)
        body = {"kind": "failed", "role": role, "rank": rank, "host": host, "reason": reason}
        return [
            Send(member.peer, body)
            for member in self._roster.everybody
            if not member.gone and member.peer != but
        ]

    def _end_if_servers_gone(self) -> None:
        if all(server.gone for server in self._roster.servers):
            self._end(0)

    def _end(self, exit_code: int) -> None:
        self._phase = Phase.ENDED
        self.exit_code = exit_code
