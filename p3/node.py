"""This process's part in a job, as a worker: its connections, shared by all its stores.

There is one node a process.  ``enlist`` registers with the scheduler (``p3 run`` does it
before the script starts, so that nobody waits for a script that is still loading data);
``join`` waits until all roles are there and connects to the servers (the first store does).
Without a job, ``join`` runs a scheduler and a server as threads of this process: the same
code over the in-process transport.

At the end ``finish`` flushes what is pending and says goodbye, or tells the job what went
wrong.  It runs at exit by itself.  In forked children the node is inert.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from p3 import __version__, address, config
from p3.config import EMBEDDED, Settings
from p3.control import ControlClient, KeyFailed, Order, PeerFailed, Registration, Welcome
from p3.errors import P3Error, PeerError, UsageError
from p3.exchange import Exchange
from p3.slicing import KeyEntry
from p3.transport import Channel, Port
from p3.transport.inproc import InprocNetwork, InprocPort
from p3.worker import Key, Worker

_GOODBYE_S = 10.0


class Node:
    """A worker's connections.  Thread-safe; made by ``enlist``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.worker: Optional[Worker] = None
        self.welcome: Optional[Welcome] = None
        self.finished = False
        self._spaces = 0
        self._keys: Dict[Tuple[int, Any], Key] = {}
        self._failure: Optional[P3Error] = None
        self._threads: List[threading.Thread] = []
        self._lock = threading.Lock()
        self._background: Optional[queue.SimpleQueue[Callable[[], None]]] = None
        self._new_port, scheduler, host = self._surroundings()
        registration = Registration(
            "worker", host, worker_id=settings.worker_id, version=__version__
        )
        self.control = ControlClient(
            self._new_port(), scheduler, settings, registration, self._on_event, _no_command
        )
        self.control.start()

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._joined().rank

    @property
    def num_workers(self) -> int:
        """Workers in the job."""
        return self._joined().num_workers

    def join(self) -> None:
        """Wait for all roles, then connect to every server; does nothing the second time.

        Raises ``PeerError`` naming who is missing or cannot be reached, ``UsageError`` if
        the scheduler refuses this process.
        """
        with self._lock:
            if self.worker is not None:
                return
            settings = self.settings
            self.welcome = self.control.wait_welcome(settings.start_timeout_s)
            port = self._new_port()
            exchange = Exchange(port, 4 * settings.slice_elems, settings.window_bytes)
            observing = settings.observe_order and self.welcome.rank == 0
            order = self.control.order if observing else None
            worker = Worker(exchange, port.wake, settings.num_servers, order)
            servers = [(b"server:%d" % s.rank, s.data, s.credit) for s in self.welcome.servers]
            worker.start(servers, self.welcome.token)
            worker.wait_connected(settings.start_timeout_s)
            self.worker = worker
            if self._failure is not None:
                worker.fail(self._failure)

    def new_space(self) -> int:
        """A number for a store's keys, from 1: a script's n-th store is the same on all ranks."""
        self._spaces += 1
        return self._spaces

    def declare(self, key: Key, mode: str, whole: bool) -> None:
        """Have ``key`` placed; its requests wait until it is.  Returns at once."""
        worker = self.worker
        assert worker is not None
        self._keys[key.space, key.name] = key
        future = self.control.declare(key.space, key.name, key.shape, key.dtype, mode, whole)

        def placed(done: Any) -> None:
            error = done.exception()
            if error is None:
                entry: KeyEntry = done.result()
                slices = entry.slices(self.settings.slice_elems, self.settings.num_servers)
                worker.know(key, entry, slices)
            else:
                worker.fail_key(key, _as_p3(error))

        future.add_done_callback(placed)

    def fail_key(self, key: Key, reason: str) -> None:
        """End all requests of ``key``, now and later, on every rank.  Returns at once."""
        worker = self.worker
        assert worker is not None
        worker.fail_key(key, UsageError(reason))
        if not self.finished and worker.error is None:  # else it is no reason, but a consequence
            self.control.fail_key(key.space, key.name, reason)

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action``, which may wait for arrays, on a thread of its own, in order."""
        if self._background is None:
            self._background = queue.SimpleQueue()
            threading.Thread(target=self._run_later, name="p3-background", daemon=True).start()
        self._background.put(action)

    def _run_later(self) -> None:
        assert self._background is not None
        while True:
            self._background.get()()

    def settle(self) -> None:
        """Block until every operation on this process's stores has ended.

        Raises ``MXNetError`` if one of MXNet's operations failed, which it raises once.
        """
        sys.modules["mxnet"].nd.waitall()  # a store has imported it
        if self._background is not None:
            done = threading.Event()
            self._background.put(done.set)
            done.wait()
        if self.worker is not None:
            self.worker.flush()

    def finish(self, code: int, reason: Optional[str]) -> int:
        """Leave the job; return the exit code.  Blocks until what was pushed has arrived.

        ``code`` 0: flush and say goodbye.  Otherwise everybody else is told ``reason``.
        """
        if self.finished or os.getpid() != self.pid:
            return code
        self.finished = True
        if code == 0:
            code, reason = self._flush()
        if code == 0:
            try:
                self.control.goodbye(_GOODBYE_S)
            except P3Error as error:
                code, reason = 1, str(error)
        if code != 0:
            self.control.fail(reason or f"the script ended with exit code {code}")
        if self.worker is not None:
            self.worker.stop(1.0)
        if code != 0:
            self._forget_errors()
        for thread in self._threads:
            thread.join(_GOODBYE_S)
        self.control.close()
        return code

    def _flush(self) -> Tuple[int, Optional[str]]:
        """Wait for all operations; ``(0, None)``, or an exit code and what went wrong."""
        mxnet = sys.modules.get("mxnet")
        error: Any = self._failure
        if error is None and self.worker is not None and mxnet is not None:
            try:
                self.settle()
            except mxnet.MXNetError as caught:
                error = caught
            error = self.worker.error or error
        if error is None:
            return 0, None
        print(f"p3: {error}", file=sys.stderr)
        return 1, str(error)

    def _forget_errors(self) -> None:
        """Read what MXNet would raise once more when it is unloaded, under the true reason."""
        mxnet = sys.modules.get("mxnet")
        if self.worker is not None and mxnet is not None:
            with contextlib.suppress(mxnet.MXNetError):
                mxnet.nd.waitall()

    def _joined(self) -> Welcome:
        if self.welcome is None:
            raise UsageError("this process has not joined a job yet")
        return self.welcome

    def _on_event(self, event: Any) -> None:
        """On the control thread."""
        if isinstance(event, PeerFailed):
            self._failure = event.error()
            if self.worker is not None:
                self.worker.fail(self._failure)
        elif isinstance(event, KeyFailed):
            key = self._keys.get((int(event.space), event.key))
            if key is not None and self.worker is not None:
                self.worker.fail_key(key, PeerError(event.reason))
        elif isinstance(event, Order) and self.worker is not None:
            self.worker.use_order(int(event.space), event.keys)

    def _surroundings(self) -> Tuple[Callable[[], Port], str, str]:
        """A factory of ports, the scheduler's address, and this host's."""
        if self.settings.role == EMBEDDED:
            network = InprocNetwork()
            return lambda: InprocPort(network), self._embed(network), "this process"
        from p3.transport.curve import derive
        from p3.transport.zmq_port import ZmqPort

        keys, encrypt = derive(self.settings.secret), self.settings.encrypt
        root, host = address.root_address(self.settings), address.own_host(self.settings)
        return lambda: ZmqPort(keys, encrypt), root, host

    def _embed(self, network: InprocNetwork) -> str:
        """Run a scheduler and a server on threads; return the scheduler's address."""
        from p3.scheduler.process import serve_on
        from p3.server.process import serve_on as run_server

        port = InprocPort(network)
        scheduler = port.listen(Channel.CONTROL, "")

        def schedule() -> None:
            serve_on(port, self.settings, __version__, say=lambda line: None)

        def serve() -> None:
            with contextlib.suppress(P3Error):  # the worker is this process, and tells of it
                run_server(self.settings, InprocPort(network), InprocPort(network), scheduler, "")

        jobs = [("p3-scheduler", schedule), ("p3-server", serve)]
        for name, target in jobs:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return scheduler


_node: Optional[Node] = None


def enlist(settings: Optional[Settings] = None) -> Node:
    """This process's node, registered with its job's scheduler.

    Raises ``UsageError`` in a child forked from the process that has one.
    """
    global _node
    if _node is not None and _node.pid != os.getpid():
        raise UsageError(
            f"p3's store belongs to process {_node.pid}, which forked this one; use it there"
        )
    if _node is None or _node.finished:
        _node = Node(settings or config.current())
        atexit.register(_at_exit)
    return _node


def created() -> bool:
    """Whether a store of p3's was created in this process."""
    return _node is not None and _node.worker is not None


def finish(code: int, reason: Optional[str]) -> int:
    """Leave the job, if this process is part of one; see ``Node.finish``."""
    return code if _node is None else _node.finish(code, reason)


def abandon(settings: Settings, reason: Optional[str]) -> int:
    """Tell the job that this worker ends without having taken part; returns 1."""
    return enlist(settings).finish(1, reason)


def _at_exit() -> None:
    """For scripts that nobody called ``finish`` for: a failure still ends non-zero."""
    if _node is None or _node.finished or _node.pid != os.getpid():
        return
    crashed = getattr(sys, "last_type", None)  # of the exception that ended the script, if any
    code = finish(1 if crashed else 0, crashed and f"the script ended with {crashed.__name__}")
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _before_fork() -> None:
    """MXNet stops its engine in ``fork``, waiting for operations that only our threads can end."""
    from p3 import engine

    if _node is not None and _node.worker is not None and engine.pending():
        engine.wait_all()


os.register_at_fork(before=_before_fork)


def _no_command(req: int, name: str, body: Any, blob: bytes, from_rank: int) -> None:
    """Workers get no commands."""


def _as_p3(error: BaseException) -> P3Error:
    return error if isinstance(error, P3Error) else PeerError(str(error))
