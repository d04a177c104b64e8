"""Commands: what the scheduler asks of every server, until the last has answered.  Pure."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Optional, Set

from p3.scheduler.messages import Body, Malformed, Send


@dataclasses.dataclass
class Command:
    """One command that is under way."""

    name: str
    done: Callable[[Command], List[Send]]  #: what to send when all have answered
    waiting: Set[int]  #: ranks of the servers that have not
    bodies: Dict[int, Body] = dataclasses.field(default_factory=dict)
    blobs: Dict[int, bytes] = dataclasses.field(default_factory=dict)
    errors: Dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def error(self) -> Optional[str]:
        """The servers' errors on one line; ``None`` without any."""
        lines = [f"server {rank}: {text}" for rank, text in sorted(self.errors.items())]
        return "; ".join(lines) or None


class Commands:
    """The commands under way, by number."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._next = 0
        self._open: Dict[int, Command] = {}

    def open(self, name: str, done: Callable[[Command], List[Send]]) -> int:
        """Begin a command; return its number."""
        number = self._next
        self._next += 1
        self._open[number] = Command(name, done, set(range(self._num_servers)))
        return number

    def answer(
        self, number: int, rank: int, body: Body, blob: bytes, error: Optional[str]
    ) -> List[Send]:
        """Note one server's answer; after the last, return what the command has to send.

        Raises ``Malformed`` if nobody waits for this answer.
        """
        command = self._open.get(number)
        if command is None or rank not in command.waiting:
            raise Malformed(f"req={number}: server {rank} was not asked, or has answered already")
        command.waiting.discard(rank)
        command.bodies[rank] = body
        command.blobs[rank] = blob
        if error is not None:
            command.errors[rank] = error
        if command.waiting:
            return []
        del self._open[number]
        return command.done(command)

    def snapshot(self) -> List[str]:
        """Each command under way and the servers that it waits for."""
        return [
            f"{number} {command.name}: waits for servers {sorted(command.waiting)}"
            for number, command in self._open.items()
        ]
