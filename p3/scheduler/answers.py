"""What clients of the scheduler are told, as values: the welcome and the events."""

from __future__ import annotations

import dataclasses
import os
from typing import Optional, Tuple, Union

from p3.errors import PeerError
from p3.scheduler.messages import (
    VERSION,
    Body,
    Key,
    Malformed,
    get_dicts,
    get_int,
    get_key,
    get_keys,
    get_str,
)


@dataclasses.dataclass(frozen=True)
class Registration:
    """What a client says about itself."""

    role: str  #: worker or server
    host: str  #: the address by which others reach this machine, for messages too
    worker_id: Optional[int] = None  #: the rank that a worker wants; else by arrival
    data: str = ""  #: where a server listens for slices
    credit: str = ""  #: where a server listens for credit
    pid: int = dataclasses.field(default_factory=os.getpid)
    version: str = VERSION


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """A worker, as the servers see it."""

    rank: int
    token: bytes  #: what to admit it by
    host: str


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """A server, as the workers see it."""

    rank: int
    data: str  #: address
    credit: str  #: address
    host: str


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The job has begun."""

    rank: int
    num_workers: int
    num_servers: int
    token: bytes = b""  #: a worker's, for its connections to the servers
    workers: Tuple[WorkerInfo, ...] = ()  #: told to servers, by rank
    servers: Tuple[ServerInfo, ...] = ()  #: told to workers, by rank


@dataclasses.dataclass(frozen=True)
class PeerFailed:
    """The job has failed; nothing more will come."""

    role: str
    rank: Optional[int]
    host: str
    reason: str

    def error(self) -> PeerError:
        """The exception to raise for it."""
        who = self.role if self.rank is None else f"{self.role} {self.rank}"
        where = f" (host {self.host})" if self.host else ""
        return PeerError(f"{who}{where} failed: {self.reason}", self.role, self.rank, self.host)


@dataclasses.dataclass(frozen=True)
class KeyFailed:
    """A key that nobody can use any more: ranks disagree on it, or one cannot go on with it."""

    space: Key
    key: Key
    reason: str


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which the forward pass uses the keys, as rank 0 observed it."""

    space: Key
    keys: Tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Left:
    """A worker has said goodbye: told to servers."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """All workers are done: a server shall finish and say goodbye."""


Event = Union[PeerFailed, KeyFailed, Order, Left, Stop]


def read_welcome(body: Body) -> Welcome:
    """The welcome in a message.  Raises ``Malformed``."""
    workers = tuple(
        WorkerInfo(get_int(item, "rank"), _token(item), get_str(item, "host"))
        for item in (get_dicts(body, "workers") if "workers" in body else ())
    )
    servers = tuple(
        ServerInfo(
            get_int(item, "rank"),
            get_str(item, "data"),
            get_str(item, "credit"),
            get_str(item, "host"),
        )
        for item in (get_dicts(body, "servers") if "servers" in body else ())
    )
    return Welcome(
        rank=get_int(body, "rank"),
        num_workers=get_int(body, "num_workers"),
        num_servers=get_int(body, "num_servers"),
        token=_token(body) if "token" in body else b"",
        workers=workers,
        servers=servers,
    )


def read_event(body: Body) -> Event:
    """The event in a message.  Raises ``Malformed``."""
    kind = get_str(body, "kind")
    if kind == "failed":
        rank = None if body.get("rank") is None else get_int(body, "rank")
        return PeerFailed(
            get_str(body, "role"), rank, get_str(body, "host"), get_str(body, "reason")
        )
    if kind == "key_failed":
        return KeyFailed(get_key(body, "space"), get_key(body, "key"), get_str(body, "reason"))
    if kind == "order":
        return Order(get_key(body, "space"), tuple(get_keys(body, "keys")))
    if kind == "left":
        return Left(get_int(body, "rank"))
    if kind == "stop":
        return Stop()
    raise Malformed(f"kind={kind!r}: unknown")


def _token(body: Body) -> bytes:
    try:
        return bytes.fromhex(get_str(body, "token"))
    except ValueError:
        raise Malformed("token: must be hexadecimal") from None
