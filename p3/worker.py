"""The worker's I/O thread: store operations in, slices out, answers back into the arrays.

One thread owns the exchange, the keys and their counters.  Other threads only append: the
training thread to a key's queue (``enqueue``, in the script's order), MXNet's engine threads
(``begin``, when the arrays are free) and the control thread (``know``, ``fail``) to the inbox.

Order.  The requests of one key run one after another, as the script made them, whichever of
them the engine begins first: a push ends when every slice of its round is answered, a pull
when every slice has come.  So a pull gives the value after the caller's latest push, never a
mixture of two rounds, and no server ever holds more than one push of a rank.  Different keys
do not wait for each other; their slices go out by priority.

Memory.  Slices are sent from the gradient's own memory and written straight into the
weight's.  Both belong to an open engine operation until ``Request.end``.  What a failed request
should have written is spoilt: it could be a mixture of two rounds.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

from p3 import compression, rows
from p3.compression import Compression
from p3.errors import InternalError, P3Error, PeerError
from p3.exchange import Exchange
from p3.forward_order import ForwardOrder
from p3.rounds import Array
from p3.slicing import KeyEntry, Slice
from p3.transport import Channel
from p3.wire import ERROR, INIT, PULL, PUSH, STALL, VALUE, Item, Record

_log = logging.getLogger("p3")


class Key:
    """A key on this worker.  The training thread makes it; the I/O thread owns the rest."""

    def __init__(self, space: int, name: Any, shape: Tuple[int, ...], dtype: str) -> None:
        self.space, self.name, self.shape, self.dtype = space, name, shape, dtype
        self.itemsize = np.dtype(dtype).itemsize
        self.nbytes = self.itemsize * math.prod(shape)
        self.row_elems = math.prod(shape[1:])
        self.error: Optional[P3Error] = None  # why no request of this key can succeed any more
        self.slices: List[Slice] = []  # empty until the scheduler has placed the key
        self.id = -1
        self.round = 0  # pushes begun
        self._residual: Optional[Array] = None
        self.queue: Deque[Request] = collections.deque()
        self.active: Optional[Request] = None

    @property
    def residual(self) -> Array:
        """What compressed pushes have left out so far, flat float32."""
        if self._residual is None:
            self._residual = np.zeros(math.prod(self.shape), np.float32)
        return self._residual


class Request:
    """One operation of a script on one key: INIT, PUSH or PULL, with its memory.

    ``step``: the training step of a push; ``extra``: what changed on the optimizer before it;
    ``flags``: as in its records; ``rows``: the ascending ids (int64) of the rows that source
    and target consist of, if it is not the whole key; ``compression``: of a push.
    """

    def __init__(
        self,
        key: Key,
        op: int,
        priority: int = 0,
        step: int = 0,
        extra: bytes = b"",
        flags: int = 0,
        rows: Optional[Array] = None,
        compression: Optional[Compression] = None,
    ) -> None:
        self.key, self.op = key, op
        self.priority = max(-(2**31), min(int(priority), 2**31 - 1))
        self.step, self.extra, self.flags = step, extra, flags
        self.rows, self.compression = rows, compression
        self.begun = False
        self.end: Callable[[Optional[str]], None] = _never_begun
        self.source: Optional[memoryview] = None
        self.target: Optional[Array] = None
        self.awaited: Set[int] = set()  # slices not answered yet

    def span(self, part: Slice) -> Tuple[int, int]:
        """The bytes of source and target that belong to a slice, from and to."""
        start, stop, itemsize = part.start, part.stop, self.key.itemsize
        if self.rows is not None:
            start, stop = rows.span(self.rows, self.key.row_elems, start, stop)[2:]
        return start * itemsize, stop * itemsize

    def payload(self, part: Slice) -> bytes | memoryview:
        """What is sent about a slice."""
        source, itemsize = self.source, self.key.itemsize
        if self.rows is not None:
            span = rows.span(self.rows, self.key.row_elems, part.start, part.stop)
            content = b"" if source is None else source[span[2] * itemsize : span[3] * itemsize]
            return rows.encode(self.rows[span[0] : span[1]], content)
        values = b"" if source is None else source[part.start * itemsize : part.stop * itemsize]
        if self.compression is not None:
            residual = self.key.residual if self.compression.keeps_residual else None
            if residual is not None:
                residual = residual[part.start : part.stop]
            return compression.encode(self.compression, np.frombuffer(values, np.float32), residual)
        return values


def _never_begun(error: Optional[str]) -> None:
    """The end of a request whose operation the engine has not started."""


class Worker:
    """The thread and its state; the public methods may be called from any thread."""

    def __init__(
        self,
        exchange: Exchange,
        wake: Callable[[], None],
        num_servers: int,
        found_order: Optional[Callable[[int, List[Any]], None]] = None,
    ) -> None:
        """``wake``: ends the exchange's wait, from any thread.

        ``found_order(space, keys)``: tell all ranks the forward order; ``None``: do not look.
        """
        self.error: Optional[P3Error] = None
        self._exchange, self._wake, self._num_servers = exchange, wake, num_servers
        self._inbox: Deque[Callable[[], None]] = collections.deque()
        self._keys: Dict[int, Key] = {}  # by id, once placed
        self._found_order = found_order
        self._observed: Dict[int, ForwardOrder] = collections.defaultdict(ForwardOrder)
        self._priorities: Dict[Tuple[int, Any], int] = {}  # by space and key, once observed
        self._open: Set[Request] = set()  # begun and not ended
        self._idle = threading.Condition()
        self._stopping = False
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p3-worker", daemon=True)

    def start(self, servers: Sequence[Tuple[bytes, str, str]], token: bytes) -> None:
        """Connect to ``servers``, as ``(peer, data address, credit address)``, and run."""
        for peer, data, credit in servers:
            self._exchange.connect(peer, data, credit, token)
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> None:
        """Block until every server has greeted; raises ``PeerError`` naming who has not."""
        if not self._greeted.wait(timeout_s):
            missing = [f"server {rank}" for rank in range(self._num_servers) if not self._met(rank)]
            raise PeerError(
                f"no answer from {', '.join(missing)} after {timeout_s:g} s: the address it"
                " advertised cannot be reached from here (see DMLC_NODE_HOST, DMLC_INTERFACE)"
            )
        if self.error is not None:
            raise self.error

    def enqueue(self, request: Request) -> None:
        """Put a request behind the earlier ones of its key; it waits for ``begin``."""
        request.key.queue.append(request)

    def begin(
        self,
        request: Request,
        end: Callable[[Optional[str]], None],
        source: Optional[memoryview] = None,
        target: Optional[memoryview] = None,
    ) -> None:
        """The request's arrays are free: ``source`` bytes to send, ``target`` bytes to write.

        ``end(error)`` is called once, on the I/O thread, when both are not needed any more.
        """
        request.end, request.source = end, source
        request.target = None if target is None else np.frombuffer(target, np.uint8)
        self._open.add(request)
        if self.error is not None:  # after the add: either we see it here or _fail_all does there
            self._end(request, str(self.error))
        else:
            self._do(lambda: self._begin(request))

    def know(self, key: Key, entry: KeyEntry, slices: List[Slice]) -> None:
        """The scheduler has placed ``key``; its requests may go."""
        self._do(lambda: self._placed(key, entry, slices))

    def use_order(self, space: int, keys: Sequence[Any]) -> None:
        """From now on send a store's keys in this order, most urgent first."""
        priorities = {(space, name): -place for place, name in enumerate(keys)}
        self._do(lambda: self._priorities.update(priorities))

    def fail_key(self, key: Key, error: P3Error) -> None:
        """End all requests of ``key``, now and later, with ``error``."""
        self._do(lambda: self._fail_key(key, error))

    def fail(self, error: P3Error) -> None:
        """End all requests, now and later, with ``error``; the first error stays."""
        if self.error is None:
            self.error = error
        self._do(self._fail_all)

    def flush(self, timeout_s: Optional[float] = None) -> bool:
        """Wait until no request is open; ``False`` after ``timeout_s``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End the thread; whatever is still open fails."""
        self._stopping = True
        self._do(lambda: None)
        self._thread.join(timeout_s)

    def _do(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake()

    def _met(self, rank: int) -> bool:
        peer = b"server:%d" % rank
        return all((c, peer) in self._exchange.greeted for c in (Channel.DATA, Channel.CREDIT))

    def _run(self) -> None:
        """The loop: receive, act, send."""
        try:
            while not self._stopping:
                for peer, items in self._exchange.receive(1.0):
                    for item in items:
                        self._answer(peer, item)
                while self._inbox:
                    self._inbox.popleft()()
                self._exchange.pump()
                if not self._greeted.is_set() and all(map(self._met, range(self._num_servers))):
                    self._greeted.set()
            raise PeerError("this process's p3 connection was closed")
        except BaseException as error:  # noqa: BLE001  # nobody else would hear of it
            if not isinstance(error, P3Error):
                error = InternalError(f"the worker's I/O thread: {type(error).__name__}: {error}")
            self.error = self.error or error
            self._fail_all()

    def _begin(self, request: Request) -> None:
        error = self.error or request.key.error
        if error is not None:
            self._end(request, str(error))
            return
        request.begun = True
        if request.op == PUSH and self._found_order is not None:
            self._observe(request, self._found_order)
        self._advance(request.key)

    def _observe(self, request: Request, found: Callable[[int, List[Any]], None]) -> None:
        key = request.key
        order = self._observed[key.space].observe(
            key.name, request.step, request.priority, time.monotonic()
        )
        if order is not None:
            found(key.space, order)

    def _placed(self, key: Key, entry: KeyEntry, slices: List[Slice]) -> None:
        key.id, key.slices = entry.id, slices
        self._keys[entry.id] = key
        self._advance(key)

    def _advance(self, key: Key) -> None:
        """Send the key's next request: if it is placed, none is under way, its arrays are free."""
        if key.active is not None or not key.slices or not (key.queue and key.queue[0].begun):
            return
        request = key.active = key.queue.popleft()
        if request.op == PUSH:
            key.round += 1
        priority = self._priorities.get((key.space, key.name), request.priority)
        request.awaited = {part.number for part in key.slices}
        for part in key.slices:
            record = Record(
                key.id, part.number, key.round, request.step, priority, request.op, request.flags
            )
            item = Item(record, request.extra, request.payload(part))
            self._exchange.put(b"server:%d" % part.server, item)

    def _answer(self, peer: bytes, item: Item) -> None:
        """One slice has been answered by a server."""
        record = item.record
        key = self._keys.get(record.key)
        request = key.active if key is not None else None
        if key is None or request is None or record.slice not in request.awaited:
            if key is None or key.error is None:
                self._exchange.reject(peer, ValueError(f"nobody awaits {record}"))
            return
        if record.op == ERROR:
            text = bytes(item.payload).decode(errors="replace")
            self._fail_key(key, PeerError(text, "server", int(peer.split(b":")[1])))
            return
        if record.op == STALL:
            _log.warning("still waiting: %s", bytes(item.payload).decode(errors="replace"))
            return
        if record.op == VALUE and request.target is not None:
            start, stop = request.span(key.slices[record.slice])
            if stop > start:
                np.copyto(request.target[start:stop], np.frombuffer(item.payload, np.uint8))
        request.awaited.discard(record.slice)
        if not request.awaited:
            key.active = None
            self._end(request, None)
            self._advance(key)

    def _fail_key(self, key: Key, error: P3Error) -> None:
        key.error = key.error or error
        requests = [*([key.active] if key.active else []), *key.queue]
        key.active = None
        key.queue.clear()
        for request in requests:
            self._end(request, str(key.error))

    def _fail_all(self) -> None:
        self._greeted.set()
        for request in list(self._open):
            request.key.active = None
            request.key.queue.clear()
            self._end(request, str(self.error))

    def _end(self, request: Request, error: Optional[str]) -> None:
        with self._idle:
            if request not in self._open:
                return
            self._open.discard(request)
            if not self._open:
                self._idle.notify_all()
        if error is not None and request.target is not None:
            _spoil(request.target, request.key.dtype)
        request.end(error)

    def __repr__(self) -> str:
        waiting = {
            str(request.key.name): sorted(request.awaited) for request in list(self._open)[:10]
        }
        return f"<Worker {len(self._open)} requests open {waiting}; {self._exchange!r}>"


def _spoil(target: Array, dtype: str) -> None:
    """Fill the bytes of a result that did not come, as some of its slices may have.

    MXNet raises the error to the first reader only; what a second one finds, or saves, must
    not look like a weight: not a number, or the largest one where the dtype has no such value.
    """
    values = target.view(dtype)
    values.fill(np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max)


__all__ = ["INIT", "PULL", "PUSH", "Key", "Request", "Worker"]
