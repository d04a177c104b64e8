"""A server's part of the keys: records in, replies out.  Pure; owned by one thread.

``Shard.handle(rank, item)`` takes one record of one worker and returns what to send to whom.
It holds the values of its units, gathers pushes into rounds (``rounds.py``), applies each
complete round and answers every rank that took part, at once, with the priority that rank 0
gave: the value itself where the push asked for it, else that it is done.

How a round is applied is the shard's one dependency: ``apply(unit, pushes)`` updates the
unit's flat ``value`` in place from the pushes in rank order.  Without an optimizer it is
``assign``.

Synchronous values are sent as they are, without a copy: the next update needs a push of
every rank, and a rank pushes a key again only when it has the value of the last round.
Asynchronous values are copied, as another rank's push may change them at any time.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from p3 import compression, rows
from p3.rounds import Array, Gathering, Part, Push, Rounds, total
from p3.server.waiting import Waiting
from p3.slicing import KeyEntry, Slice
from p3.wire import (
    COMPRESSED,
    DONE,
    ERROR,
    INIT,
    PULL,
    PUSH,
    REPLACE,
    ROWS,
    STALL,
    VALUE,
    WANT_VALUE,
    Item,
    Record,
)


class Reply(NamedTuple):
    """An item for the worker of that rank."""

    rank: int
    item: Item


class Unit:
    """One piece that is updated at once: its value, its pushes, the pulls that wait for it."""

    def __init__(self, entry: KeyEntry, slices: Sequence[Slice], num_workers: int) -> None:
        self.entry = entry
        self.slices = {part.number: part for part in slices}
        self.start, stop = slices[0].start, slices[-1].stop
        self.whole = entry.whole or stop - self.start == entry.size
        self.value: Array = np.zeros(stop - self.start, entry.dtype)
        self.missing = set(self.slices)  # slices not initialised yet
        self.gathering = Gathering(list(self.slices))
        self.rounds = Rounds(num_workers)
        self.waiting: List[Tuple[int, Item]] = []  # pulls before the value is there
        self.pulls: Dict[int, List[Item]] = {}  # by rank, until all slices are asked for
        self.error: Optional[str] = None

    @property
    def name(self) -> str:
        """For messages: the key, and the slice where the key has several."""
        first = next(iter(self.slices))
        return f"key {self.entry.key!r}" + ("" if self.whole else f" slice {first}")

    def awaited(self) -> List[int]:
        """The ranks that keep others waiting: for their push, or for the first value."""
        if self.missing:
            return [0] if self.waiting or self.rounds.awaited() else []
        return self.rounds.awaited() if self.entry.mode == "sync" else []

    def waits_for(self) -> str:
        """What is waited for, for messages."""
        if self.missing:
            return f"{self.name}: its first value"
        return f"{self.name}: round {max(record.round for _, record in self.open())}"

    def open(self) -> List[Tuple[int, Record]]:
        """``(rank, record)`` of all that are not answered."""
        pulls = [(rank, item.record) for rank, item in self.waiting]
        return pulls + [(p.rank, record) for p in self.rounds.pushes() for record in p.records]

    def part(self, index: int) -> Array:
        """The view of ``value`` that slice ``index`` is."""
        place = self.slices[index]
        return self.value[place.start - self.start : place.stop - self.start]


Apply = Callable[[Unit, List[Push]], None]


def assign(unit: Unit, pushes: List[Push]) -> None:
    """What a store without an optimizer does: the sum is the value."""
    total(pushes, unit.value)


class Shard:
    """The units of one server."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        num_servers: int,
        slice_elems: int,
        apply: Apply,
        waiting: Optional[Waiting[Unit]] = None,
    ) -> None:
        self._rank, self._num_workers, self._num_servers = rank, num_workers, num_servers
        self._slice_elems, self._apply = slice_elems, apply
        self.entries: Dict[int, KeyEntry] = {}
        self._units: Dict[Tuple[int, int], Unit] = {}
        self._waiting: Waiting[Unit] = waiting or Waiting(0, 0)

    def add_key(self, entry: KeyEntry) -> None:
        """Learn a key; must come before its first record.  Repeats are ignored."""
        if entry.id in self.entries:
            return
        self.entries[entry.id] = entry
        slices = entry.slices(self._slice_elems, self._num_servers)
        mine = [part for part in slices if part.server == self._rank]
        for group in [mine] if entry.whole and mine else [[part] for part in mine]:
            unit = Unit(entry, group, self._num_workers)
            for part in group:
                self._units[entry.id, part.number] = unit

    def units(self, space: int) -> List[Unit]:
        """The units of a space, each once, in key order."""
        found = (unit for unit in self._units.values() if unit.entry.space == space)
        return list(dict.fromkeys(found))

    def handle(self, rank: int, item: Item) -> List[Reply]:
        """Take one record of worker ``rank``.  Raises ``ValueError`` if it makes no sense."""
        record = item.record
        unit = self._units.get((record.key, record.slice))
        if unit is None:
            raise ValueError(f"no slice {record.slice} of key id {record.key} here")
        if unit.error is not None:
            return [_error(unit, rank, record)]
        if record.op == PUSH:
            return self._push(unit, rank, item)
        if record.op == PULL:
            return self._pull(unit, rank, item)
        if record.op == INIT:
            return self._init(unit, rank, item)
        raise ValueError(f"operation {record.op} is not for a server")

    def _pull(self, unit: Unit, rank: int, item: Item) -> List[Reply]:
        """Answer a pull; of a key with several slices here, all at once.

        Asynchronous updates come at any time: the slices must not be of two of them.
        """
        items = unit.pulls.setdefault(rank, [])
        items.append(item)
        if len(items) < len(unit.slices):
            return []
        del unit.pulls[rank]
        if unit.missing:
            unit.waiting += [(rank, each) for each in items]
            return self._wait(unit)
        return [Reply(rank, _pulled(unit, each)) for each in items]

    def _init(self, unit: Unit, rank: int, item: Item) -> List[Reply]:
        """Store a slice's first value; later ones change nothing, unless they are to replace it.

        A value that is replaced may still be on its way to somebody, from its own memory.
        """
        record = item.record
        replies = [Reply(rank, _done(record))]
        if record.slice in unit.missing or record.flags & REPLACE:
            if record.slice not in unit.missing:
                unit.value = unit.value.copy()
            unit.part(record.slice)[...] = _part(unit, item)
            unit.missing.discard(record.slice)
            if not unit.missing:
                replies += [Reply(puller, _pulled(unit, pull)) for puller, pull in unit.waiting]
                unit.waiting.clear()
                self._waiting.restart(unit)
                replies += self._complete(unit)
        return replies

    def _push(self, unit: Unit, rank: int, item: Item) -> List[Reply]:
        push = unit.gathering.add(rank, item.record, item.extra, _part(unit, item))
        if push is None:
            return []
        if unit.entry.mode == "async" and not unit.missing:
            return self._update(unit, [push])
        unit.rounds.add(push)
        return self._complete(unit)

    def leave(self, rank: int) -> List[Reply]:
        """``rank`` has said goodbye: what waits for it fails."""
        return [reply for unit in self._waiting.leave(rank) for reply in self._wait(unit)]

    def tick(self, now: float) -> List[Reply]:
        """Let time pass; tell those who have waited long.  To be called often."""
        replies: List[Reply] = []
        for unit, waited_s, over in self._waiting.late(now):
            ranks = ", ".join(map(str, unit.awaited()))
            what = f"{unit.waits_for()} has waited {waited_s:.0f} s for rank {ranks}"
            if over:
                replies += self._give_up(unit, f"{what} (P3_ROUND_TIMEOUT_S)")
            else:
                replies += [_text(STALL, what, rank, record) for rank, record in unit.open()]
        return replies

    def _wait(self, unit: Unit) -> List[Reply]:
        """Note whom the unit waits for; if one of them has gone, it waits in vain."""
        awaited = unit.awaited()
        self._waiting.note(unit, awaited)
        gone = self._waiting.gone(awaited)
        if gone is None:
            return []
        return self._give_up(unit, f"{unit.waits_for()} waits for rank {gone}, which has ended")

    def _give_up(self, unit: Unit, reason: str) -> List[Reply]:
        unit.error = reason
        self._waiting.restart(unit)
        replies = [_error(unit, rank, record) for rank, record in unit.open()]
        unit.rounds.clear()
        unit.waiting.clear()
        return replies

    def _complete(self, unit: Unit) -> List[Reply]:
        """Apply every round that is complete."""
        replies: List[Reply] = []
        while not unit.missing:
            pushes = unit.rounds.next() if unit.entry.mode == "sync" else unit.rounds.any()
            if pushes is None:
                break
            self._waiting.restart(unit)
            replies += self._update(unit, pushes)
        return replies + (self._wait(unit) if unit.error is None else [])

    def _update(self, unit: Unit, pushes: List[Push]) -> List[Reply]:
        """Apply one round and answer its pushes in rank order."""
        try:
            self._apply(unit, pushes)
        except Exception as error:  # noqa: BLE001  # the optimizer's: every rank must hear it
            unit.error = (
                f"{unit.name}: the update of round {pushes[0].records[0].round} failed on server"
                f" {self._rank}: {type(error).__name__}: {error}"
            )
            return [_error(unit, push.rank, record) for push in pushes for record in push.records]
        replies: List[Reply] = []
        for place, record in enumerate(pushes[0].records):
            items: Dict[int, Item] = {}  # by what was asked for: the same for all ranks
            for push in pushes:
                wanted = push.records[place].flags & WANT_VALUE
                if wanted not in items:
                    items[wanted] = _value(unit, record) if wanted else _done(record)
                replies.append(Reply(push.rank, items[wanted]))
        return replies

    def __repr__(self) -> str:
        late = {
            unit.name: unit.rounds.awaited()
            for unit in self._units.values()
            if unit.rounds.awaited()
        }
        return f"<Shard {self._rank}: {len(self._units)} slices, awaited ranks: {late or 'none'}>"


def _part(unit: Unit, item: Item) -> Part:
    """The item's payload as an array; raises ``ValueError`` unless it fits the slice."""
    place = unit.slices[item.record.slice]
    size = len(item.payload)
    if item.record.flags & ROWS:
        return _rows(unit, item, True)
    if item.record.flags & COMPRESSED:
        return compression.decode(item.payload, place.stop - place.start)
    array = np.frombuffer(item.payload, unit.entry.dtype) if size else np.empty(0)
    if len(array) != place.stop - place.start:
        raise ValueError(
            f"{unit.name}: {len(array)} elements where the slice has {place.stop - place.start}"
        )
    return array


def _rows(unit: Unit, item: Item, with_values: bool) -> rows.Rows:
    place, entry = unit.slices[item.record.slice], unit.entry
    return rows.decode(
        item.payload, entry.dtype, entry.row_elems, place.start, place.stop, with_values
    )


def _pulled(unit: Unit, item: Item) -> Item:
    """What a pull gets: the slice, or the elements of it that are in the rows it asks for."""
    record = item.record
    if not record.flags & ROWS:
        return _value(unit, record)
    chosen = unit.part(record.slice)[_rows(unit, item, False).offsets]
    return Item(record._replace(op=VALUE, flags=0), b"", chosen.tobytes())


def _value(unit: Unit, record: Record) -> Item:
    payload = memoryview(unit.part(record.slice).view(np.uint8))
    if unit.entry.mode == "async":
        payload = memoryview(bytes(payload))
    return Item(record._replace(op=VALUE, flags=0), b"", payload)


def _done(record: Record) -> Item:
    return Item(record._replace(op=DONE, flags=0), b"", b"")


def _error(unit: Unit, rank: int, record: Record) -> Reply:
    return _text(ERROR, unit.error or "", rank, record)


def _text(op: int, text: str, rank: int, record: Record) -> Reply:
    return Reply(rank, Item(record._replace(op=op, flags=0), b"", text.encode()))
