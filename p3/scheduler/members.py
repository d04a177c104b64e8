"""The roster: who has registered, which rank each got, who is still missing.  Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence

from p3.config import SERVER, WORKER, Settings
from p3.scheduler.messages import Body, Malformed, get_dict, get_int, get_str, shown

_VARIABLES = {"num_workers": "DMLC_NUM_WORKER", "num_servers": "DMLC_NUM_SERVER"}


@dataclasses.dataclass
class Member:
    """One registered worker or server."""

    peer: bytes
    role: str
    worker_id: Optional[int]
    host: str
    pid: int
    data: str  #: a server's address for slices
    credit: str  #: a server's address for credit
    rank: int = -1  #: given when all are there
    token: bytes = b""  #: what the servers admit a worker by
    ready: bool = False  #: a server that admits the workers' tokens
    gone: bool = False  #: has said goodbye

    def __str__(self) -> str:
        rank = self.rank if self.rank >= 0 else self.worker_id
        name = self.role if rank is None else f"{self.role} {rank}"
        return f"{name} (host {self.host}, pid {self.pid})"


class Roster:
    """Registration up to the moment when everybody is there, and look-ups from then on."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._agreed = settings.agreed()
        self._version = version
        self._wanted = {WORKER: settings.num_workers, SERVER: settings.num_servers}
        self._members: Dict[bytes, Member] = {}  # by peer, in order of arrival

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._members

    def get(self, peer: bytes) -> Member:
        """The member called ``peer``.  Raises ``Malformed`` for a stranger."""
        if peer not in self._members:
            raise Malformed("the sender is not registered")
        return self._members[peer]

    @property
    def everybody(self) -> List[Member]:
        """All members, in order of arrival."""
        return list(self._members.values())

    @property
    def workers(self) -> List[Member]:
        """The workers, by rank once they have one."""
        return self._of(WORKER)

    @property
    def servers(self) -> List[Member]:
        """The servers, by rank once they have one."""
        return self._of(SERVER)

    @property
    def complete(self) -> bool:
        """Whether all the workers and servers of the job are there."""
        return all(len(self._of(role)) == wanted for role, wanted in self._wanted.items())

    def refusal(self, body: Body) -> Optional[str]:
        """Why this registration cannot be accepted; ``None`` if it can.  Raises ``Malformed``."""
        member = _member(b"", body)
        return (
            _differ("p3's version", get_str(body, "version"), self._version, "install the same p3")
            or self._disagreement(get_dict(body, "agreed"))
            or self._no_place(member)
        )

    def add(self, peer: bytes, body: Body) -> Member:
        """Enter a registration that was not refused."""
        member = self._members[peer] = _member(peer, body)
        return member

    def remove(self, peer: bytes) -> None:
        """Free a place (only before the ranks are given)."""
        del self._members[peer]

    def give_ranks(self) -> None:
        """Workers by DMLC_WORKER_ID where given, else by arrival; servers by arrival."""
        taken = {worker.worker_id for worker in self.workers}
        free = iter([rank for rank in range(self._wanted[WORKER]) if rank not in taken])
        for worker in self.workers:
            worker.rank = next(free) if worker.worker_id is None else worker.worker_id
        for rank, server in enumerate(self.servers):
            server.rank = rank

    def missing(self) -> str:
        """Who is missing, as in ``1 worker (rank 1), 2 servers``; empty if nobody is."""
        workers = self._wanted[WORKER] - len(self.workers)
        servers = self._wanted[SERVER] - len(self.servers)
        parts = []
        if workers:
            parts.append(count(workers, WORKER) + self._missing_ranks())
        if servers:
            parts.append(count(servers, SERVER))
        return ", ".join(parts)

    def _missing_ranks(self) -> str:
        """The ranks nobody has, if all the workers that are here said which they are."""
        taken = {worker.worker_id for worker in self.workers}
        if not taken or None in taken:
            return ""
        return f" ({ranks([rank for rank in range(self._wanted[WORKER]) if rank not in taken])})"

    def _of(self, role: str) -> List[Member]:
        found = [member for member in self._members.values() if member.role == role]
        return sorted(found, key=lambda member: member.rank)  # stable: by arrival before ranks

    def _disagreement(self, theirs: Body) -> Optional[str]:
        for name in sorted({*self._agreed, *theirs}):
            variable = _VARIABLES.get(name, "P3_" + name.upper())
            mine = self._agreed.get(name)
            reason = _differ(name, theirs.get(name), mine, f"set {variable} to the same value")
            if reason:
                return reason
        return None

    def _no_place(self, member: Member) -> Optional[str]:
        wanted, others = self._wanted[member.role], self._of(member.role)
        if member.worker_id is not None and member.worker_id >= wanted:
            asked = shown(member.worker_id)
            return f"worker_id {asked}: must be from 0 to {wanted - 1} (DMLC_WORKER_ID)"
        for other in others:
            if other.worker_id is not None and other.worker_id == member.worker_id:
                return f"worker_id {member.worker_id} is taken by {other}; give each its own"
        if len(others) >= wanted:
            here = ", ".join(str(other) for other in others[:8])
            return f"the job has {count(wanted, member.role)} and all are there: {here}"
        return None


def ranks(numbers: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2, 3``, or the first few of many."""
    listed = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'' if len(numbers) == 1 else 's'} {listed}{more}"


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _member(peer: bytes, body: Body) -> Member:
    role = get_str(body, "role")
    if role not in (WORKER, SERVER):
        raise Malformed(f"role={shown(role)}: must be worker or server")
    worker_id = None
    if role == WORKER and body.get("worker_id") is not None:
        worker_id = get_int(body, "worker_id")
    addresses = get_dict(body, "addresses") if role == SERVER else {"data": "", "credit": ""}
    return Member(
        peer=peer,
        role=role,
        worker_id=worker_id,
        host=get_str(body, "host"),
        pid=get_int(body, "pid"),
        data=get_str(addresses, "data"),
        credit=get_str(addresses, "credit"),
    )


def _differ(what: str, theirs: Any, mine: Any, remedy: str) -> Optional[str]:
    if theirs == mine:
        return None
    return f"{what} is {shown(theirs)} here and {shown(mine)} at the scheduler; {remedy} everywhere"
