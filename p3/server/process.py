"""A server: one loop that takes slices, lets the shard decide, and sends its replies.

The thread that calls ``ServerLoop.run`` owns the exchange, the shard and the updaters.  The
control thread hands commands over through the inbox and wakes it; each is answered when the
loop has carried it out, so an acknowledged key or optimizer is really there.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from p3 import __version__
from p3.config import Settings
from p3.control import ControlClient, Event, Left, PeerFailed, Registration, Stop
from p3.errors import P3Error, UsageError
from p3.exchange import Exchange
from p3.rounds import Push
from p3.server.shard import Reply, Shard, Unit, assign
from p3.server.updater import Updater
from p3.server.waiting import Waiting
from p3.slicing import KeyEntry
from p3.transport import Channel, Port

_GOODBYE_S = 5.0
#: (blob, error): the answer to a command
Answer = Callable[[bytes, Optional[str]], None]


class ServerLoop:
    """A shard at work.  ``command``, ``stop`` and ``fail`` may be called from any thread."""

    def __init__(
        self, exchange: Exchange, wake: Callable[[], None], settings: Settings, rank: int
    ) -> None:
        self.error: Optional[P3Error] = None
        self._exchange, self._wake, self._settings = exchange, wake, settings
        self._inbox: Deque[Callable[[], None]] = collections.deque()
        self._stopped = False
        self._updaters: Dict[int, Updater] = {}  # by space
        self._shard = Shard(
            rank,
            settings.num_workers,
            settings.num_servers,
            settings.slice_elems,
            self._apply,
            Waiting(settings.stall_report_s, settings.round_timeout_s),
        )

    def accept(self, workers: List[Tuple[int, bytes]]) -> None:
        """Admit the job's workers, ``(rank, token)``; before ``run``."""
        for rank, token in workers:
            self._exchange.accept(b"worker:%d" % rank, token)

    def run(self) -> None:
        """Serve until ``stop`` or ``fail``.  Blocks."""
        while not self._stopped:
            self._reply(self._shard.tick(time.monotonic()))
            for peer, items in self._exchange.receive(1.0):
                rank = int(peer.split(b":")[1])
                for item in items:
                    try:
                        replies = self._shard.handle(rank, item)
                    except ValueError as error:
                        self._exchange.reject(peer, error)
                        continue
                    self._reply(replies)
                self._exchange.pump()
            while self._inbox:
                self._inbox.popleft()()

    def command(self, name: str, body: Dict[str, Any], blob: bytes, answer: Answer) -> None:
        """Carry out what the scheduler passes on, in the loop's thread, then ``answer``."""
        self._do(lambda: self._command(name, body, blob, answer))

    def hear(self, event: Event) -> None:
        """Act on what the scheduler tells: a worker has left, the job has ended or failed."""
        if isinstance(event, Left):
            rank = event.rank
            self._do(lambda: self._reply(self._shard.leave(rank)))
        elif isinstance(event, Stop):
            self.stop()
        elif isinstance(event, PeerFailed):
            self.fail(event.error())

    def stop(self) -> None:
        """End ``run``; nothing is owed to anybody."""
        self._stopped = True
        self._wake()

    def fail(self, error: P3Error) -> None:
        """End ``run`` because the job has failed."""
        self.error = self.error or error
        self.stop()

    def _reply(self, replies: List[Reply]) -> None:
        for reply in replies:
            self._exchange.put(b"worker:%d" % reply.rank, reply.item)

    def _do(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake()

    def _command(self, name: str, body: Dict[str, Any], blob: bytes, answer: Answer) -> None:
        found = b""
        try:
            if name == "key":
                self._shard.add_key(KeyEntry(**{**body, "shape": tuple(body["shape"])}))
            elif name == "optimizer":
                self._set_optimizer(int(body["space"]), blob)
            elif name == "get_states":
                found = self._updaters[int(body["space"])].get_states()
            elif name == "set_states":
                self._updaters[int(body["space"])].set_states(blob)
            else:
                raise UsageError(f"servers know no command {name!r}")
        except Exception as error:  # noqa: BLE001  # whatever it is, the worker that asked must hear it
            answer(b"", str(error) if isinstance(error, P3Error) else repr(error))
        else:
            answer(found, None)

    def _set_optimizer(self, space: int, pickled: bytes) -> None:
        """The first optimizer of a space stays: every rank sets the same one, in any order."""
        updater = self._updaters.get(space)
        if updater is None:
            self._updaters[space] = Updater(pickled, self._settings.allow_optimizers)
        else:
            updater.check(pickled)

    def _apply(self, unit: Unit, pushes: List[Push]) -> None:
        updater = self._updaters.get(unit.entry.space)
        if updater is None:
            assign(unit, pushes)
        else:
            updater.apply(unit, pushes)

    def __repr__(self) -> str:
        return f"<ServerLoop {self._shard!r}, {self._exchange!r}>"


def serve(settings: Settings) -> int:
    """Be a server until the job ends, in a process of its own; returns the exit code."""
    from p3 import address
    from p3.transport.curve import derive
    from p3.transport.zmq_port import ZmqPort

    keys = derive(settings.secret)
    control, data = ZmqPort(keys, settings.encrypt), ZmqPort(keys, settings.encrypt)
    root, host = address.root_address(settings), address.own_host(settings)
    return serve_on(settings, control, data, root, host)


def serve_on(settings: Settings, control: Port, data: Port, scheduler: str, host: str) -> int:
    """Be a server over the given ports, which it closes; returns the exit code.  Blocks."""
    registration = Registration(
        "server",
        host,
        data=data.listen(Channel.DATA, host),
        credit=data.listen(Channel.CREDIT, host),
        version=__version__,
    )
    loop: List[ServerLoop] = []

    def on_event(event: Any) -> None:
        if loop:
            loop[0].hear(event)

    def on_command(req: int, name: str, body: Dict[str, Any], blob: bytes, rank: int) -> None:
        loop[0].command(name, body, blob, lambda b, error: client.reply(req, {}, b, error))

    client = ControlClient(control, scheduler, settings, registration, on_event, on_command)
    client.start()
    try:
        welcome = client.wait_welcome(settings.start_timeout_s)
        exchange = Exchange(data, 4 * settings.slice_elems, settings.window_bytes)
        loop.append(ServerLoop(exchange, data.wake, settings, welcome.rank))
        loop[0].accept([(worker.rank, worker.token) for worker in welcome.workers])
        client.ready()
        loop[0].run()
        if loop[0].error is not None:
            raise loop[0].error
        client.goodbye(_GOODBYE_S)
    except BaseException as error:
        client.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        client.close()
        data.close()
    return 0
