"""What running workers ask for: keys, commands to the servers, barriers, the order.  Pure.

    ask      -> command to every server   -> all answered -> reply
    declare  -> command "key", once a key -> all answered -> reply to each who declared it
    barrier  -> all workers have come     -> reply to each
    fail_key -> event to each who declared the key
    order    -> event to every worker
    status   -> reply at once

A reply carries ``error`` (null if all went well) and ``fault``: "usage" if the caller asked
for something impossible, "peer" if somebody else failed or disagrees.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from p3.config import SERVER, WORKER, Settings
from p3.errors import UsageError
from p3.scheduler.barrier import Barrier
from p3.scheduler.commands import Command, Commands
from p3.scheduler.directory import Directory, Entry, Spec, conflict
from p3.scheduler.members import Member, Roster
from p3.scheduler.messages import (
    Body,
    Malformed,
    Send,
    get_dict,
    get_int,
    get_key,
    get_keys,
    get_str,
    join_blobs,
)

Handler = Callable[[Member, Body, bytes], List[Send]]


class Requests:
    """Requests under way in a running job."""

    def __init__(self, settings: Settings, roster: Roster) -> None:
        self._roster = roster
        self._directory = Directory(settings.num_servers, settings.slice_elems)
        self._commands = Commands(settings.num_servers)
        self._barrier = Barrier()
        self.handlers: Dict[str, Handler] = {
            "ask": _only(WORKER, self._ask),
            "declare": _only(WORKER, self._declare),
            "barrier": _only(WORKER, self._arrive),
            "fail_key": _only(WORKER, self._fail_key),
            "order": _only(WORKER, self._order),
            "status": _only(WORKER, self._status),
            "reply": _only(SERVER, self._answer),
        }

    def worker_left(self, member: Member) -> List[Send]:
        """``member`` said goodbye: those who wait for it at a barrier get an error."""
        lost = self._barrier.leave(member.rank)
        reason = f"{member} has ended and will not come to the barrier"
        return [self._reply(rank, req, reason) for rank, req in lost]

    def snapshot(self) -> Dict[str, Any]:
        """Who waits for whom, as plain values."""
        waiting = self._barrier.waiting
        present = [worker.rank for worker in self._roster.workers if not worker.gone]
        absent = [rank for rank in present if rank not in waiting] if waiting else []
        return {
            "barrier": {"waiting": waiting, "absent": absent},
            "commands": self._commands.snapshot(),
            "keys": len(self._directory),
            "keys_unknown": [str(entry) for entry in self._directory.unknown],
            "loads_bytes": self._directory.loads_bytes,
        }

    def _ask(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        req, name, inner = get_int(body, "req"), get_str(body, "name"), get_dict(body, "body")

        def done(command: Command) -> List[Send]:
            ranks = sorted(command.bodies)
            sizes, joined = join_blobs([command.blobs[rank] for rank in ranks])
            bodies = [command.bodies[rank] for rank in ranks]
            fields = {"bodies": bodies, "sizes_bytes": sizes}
            return [self._reply(member.rank, req, command.error, fields, joined)]

        return self._command(name, inner, blob, member.rank, done)

    def _declare(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        req, spec = get_int(body, "req"), Spec.read(body)
        entry = self._directory.find(body)
        sends: List[Send] = []
        if entry is None:
            try:
                entry = self._directory.add(member.rank, body)
            except UsageError as error:
                return [self._reply(member.rank, req, str(error), fault="usage")]
            sends = self._tell_servers(entry, member)
        reason = conflict(entry, member.rank, spec)
        if reason is not None:
            return [*self._break(entry, reason), self._reply(member.rank, req, reason)]
        entry.declared_by.add(member.rank)
        entry.waiters.append((member.rank, req))
        return sends + (self._answer_waiters(entry) if entry.known else [])

    def _tell_servers(self, entry: Entry, member: Member) -> List[Send]:
        def done(command: Command) -> List[Send]:
            entry.known = True
            sends = self._break(entry, f"{entry}: {command.error}") if command.error else []
            return sends + self._answer_waiters(entry)

        return self._command("key", entry.command(), b"", member.rank, done)

    def _break(self, entry: Entry, reason: str) -> List[Send]:
        """Nobody can use the key any more: tell everybody who declared it, once."""
        if entry.broken is not None:
            return []
        entry.broken = reason
        event = {"kind": "key_failed", "space": entry.space, "key": entry.key, "reason": reason}
        workers = self._roster.workers
        told = [Send(workers[rank].peer, event) for rank in sorted(entry.declared_by)]
        return told + self._answer_waiters(entry)

    def _fail_key(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        entry = self._directory.find(body)
        if entry is None:
            raise Malformed(f"fail_key from {member} for a key that nobody has declared")
        return self._break(entry, get_str(body, "reason"))

    def _answer_waiters(self, entry: Entry) -> List[Send]:
        waiters, entry.waiters = entry.waiters, []
        fields = {"id": entry.number, "first": entry.first, "whole": entry.spec.whole}
        return [self._reply(rank, req, entry.broken, fields) for rank, req in waiters]

    def _arrive(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        self._barrier.arrive(member.rank, get_int(body, "req"))
        present = [worker.rank for worker in self._roster.workers if not worker.gone]
        return [self._reply(rank, req, None) for rank, req in self._barrier.release(present) or []]

    def _order(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        if member.rank != 0:
            raise Malformed(f"order from rank {member.rank}: only rank 0 tells it")
        event = {"kind": "order", "space": get_key(body, "space"), "keys": get_keys(body, "keys")}
        return [Send(worker.peer, event) for worker in self._roster.workers if not worker.gone]

    def _status(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        return [self._reply(member.rank, get_int(body, "req"), None, {"status": self.snapshot()})]

    def _answer(self, member: Member, body: Body, blob: bytes) -> List[Send]:
        error = None if body.get("error") is None else get_str(body, "error")
        req, inner = get_int(body, "req"), get_dict(body, "body")
        return self._commands.answer(req, member.rank, inner, blob, error)

    def _command(
        self,
        name: str,
        inner: Body,
        blob: bytes,
        from_rank: int,
        done: Callable[[Command], List[Send]],
    ) -> List[Send]:
        """The same command to every server."""
        body = {
            "kind": "command",
            "req": self._commands.open(name, done),
            "name": name,
            "body": inner,
            "from_rank": from_rank,
        }
        return [Send(server.peer, body, blob) for server in self._roster.servers]

    def _reply(
        self,
        rank: int,
        req: int,
        error: Optional[str],
        fields: Optional[Body] = None,
        blob: bytes = b"",
        fault: str = "peer",
    ) -> Send:
        body = {"kind": "reply", "req": req, "error": error, "fault": fault, **(fields or {})}
        return Send(self._roster.workers[rank].peer, body, blob)


def _only(role: str, handler: Handler) -> Handler:
    """``handler``, for members of one role that have not said goodbye."""

    def guarded(member: Member, body: Body, blob: bytes) -> List[Send]:
        if member.role != role or member.gone:
            raise Malformed(f"{body['kind']} from {member}{', gone' if member.gone else ''}")
        return handler(member, body, blob)

    return guarded
