"""The directory of keys: number, first server and shape of each, agreed by all ranks.  Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Optional, Set, Tuple

import numpy as np

from p3.errors import UsageError
from p3.scheduler.messages import Body, Key, get_bool, get_key, get_sizes, get_str, shown
from p3.scheduler.placement import Placement

_MOST_SLICES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Spec:
    """What all ranks must say alike when they declare a key."""

    shape: Tuple[int, ...]
    dtype: str
    mode: str
    whole: bool

    @classmethod
    def read(cls, body: Body) -> Spec:
        """The spec in a message.  Raises ``Malformed``."""
        return cls(
            shape=tuple(get_sizes(body, "shape")),
            dtype=get_str(body, "dtype"),
            mode=get_str(body, "mode"),
            whole=get_bool(body, "whole"),
        )

    def __str__(self) -> str:
        whole = ", whole" if self.whole else ""
        return f"shape {shown(self.shape)}, {shown(self.dtype)}, mode {shown(self.mode)}{whole}"


@dataclasses.dataclass
class Entry:
    """One key."""

    number: int  #: its id: dense, from 0
    space: Key
    key: Key
    spec: Spec
    first: int  #: the server of its slice 0
    rank: int  #: who declared it first
    known: bool = False  #: every server has acknowledged it
    broken: Optional[str] = None  #: why nobody can use it any more
    declared_by: Set[int] = dataclasses.field(default_factory=set)
    waiters: List[Tuple[int, int]] = dataclasses.field(default_factory=list)  #: (rank, request)

    def command(self) -> Body:
        """What the servers are told."""
        return {
            "id": self.number,
            "space": self.space,
            "key": self.key,
            "first": self.first,
            **dataclasses.asdict(self.spec),
        }

    def __str__(self) -> str:
        return f"key {shown(self.key)} of store {shown(self.space)}"


class Directory:
    """All keys, each placed at its first declaration."""

    def __init__(self, num_servers: int, slice_elems: int) -> None:
        self._slice_elems = slice_elems
        self._placement = Placement(num_servers)
        self._entries: Dict[Tuple[Key, Key], Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def unknown(self) -> List[Entry]:
        """Keys that some server has not acknowledged yet."""
        return [entry for entry in self._entries.values() if not entry.known]

    @property
    def loads_bytes(self) -> List[int]:
        """Bytes placed on each server."""
        return self._placement.loads_bytes

    def find(self, body: Body) -> Optional[Entry]:
        """The entry that a declaration is about, if there is one.  Raises ``Malformed``."""
        return self._entries.get((get_key(body, "space"), get_key(body, "key")))

    def add(self, rank: int, body: Body) -> Entry:
        """Number and place a new key.

        Raises ``Malformed``, and ``UsageError`` if nobody could store such a key.
        """
        space, key, spec = get_key(body, "space"), get_key(body, "key"), Spec.read(body)
        sizes_bytes = slice_sizes_bytes(spec, self._slice_elems)
        first = self._placement.place(sizes_bytes, spec.whole)
        entry = Entry(len(self._entries), space, key, spec, first, rank)
        self._entries[space, key] = entry
        return entry


def conflict(entry: Entry, rank: int, spec: Spec) -> Optional[str]:
    """Why ``rank`` cannot declare ``entry`` as ``spec``; ``None`` if it can."""
    if spec == entry.spec:
        return entry.broken
    if rank == entry.rank:
        who = f"rank {rank} declared it with {entry.spec}, then with {spec}"
    else:
        who = f"rank {entry.rank} declared it with {entry.spec}, rank {rank} with {spec}"
    return f"{entry}: {who}; all ranks must declare a key alike, once"


def slice_sizes_bytes(spec: Spec, slice_elems: int) -> List[int]:
    """The bytes of each slice of a key: full ones, then the rest; one of 0 for an empty key.

    Raises ``UsageError`` for a dtype that is no number and for far too many slices.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except (TypeError, ValueError, SyntaxError, OverflowError, RecursionError):
        raise UsageError(f"dtype {shown(spec.dtype)} is not one that numpy knows") from None
    if dtype.kind not in "biuf":
        raise UsageError(f"dtype {shown(spec.dtype)}: elements must be real numbers")
    full, rest = divmod(math.prod(spec.shape), slice_elems)
    if full > _MOST_SLICES:
        raise UsageError(
            f"shape {shown(spec.shape)} makes more than {_MOST_SLICES} slices of {slice_elems}"
            " elements; set P3_SLICE_ELEMS higher"
        )
    sizes = [slice_elems * dtype.itemsize] * full
    if rest or not sizes:
        sizes.append(rest * dtype.itemsize)
    return sizes
