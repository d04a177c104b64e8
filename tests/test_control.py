"""Clients and the scheduler together, over both transports."""

import concurrent.futures
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from p3.config import SCHEDULER, SERVER, WORKER, Settings
from p3.control import (
    ControlClient,
    KeyFailed,
    Order,
    PeerFailed,
    Registration,
    Stop,
)
from p3.errors import InternalError, PeerError, UsageError
from p3.scheduler.messages import decode, encode
from p3.scheduler.process import StopFlag, serve, serve_on
from p3.transport import Channel
from p3.transport.curve import derive
from p3.transport.inproc import InprocNetwork, InprocPort
from p3.transport.zmq_port import ZmqPort

DEADLINE_S = 30.0
LOCAL = "127.0.0.1"


class Node:
    """A client that records its events; as a server it answers commands, unless told not to."""

    def __init__(self, port, address, settings, role, on_command=None, **fields):
        self.events = queue.Queue()
        self.on_event = self.events.put
        self.names = []
        self.answer = on_command or self.echo
        registration = Registration(role, LOCAL, data="data!", credit="credit!", **fields)
        self.client = ControlClient(
            port,
            address,
            settings,
            registration,
            self.on_any_event,
            self.on_command,
        )
        self.client.start()
        self.welcome = None

    def on_any_event(self, event):
        self.on_event(event)

    def on_command(self, req, name, body, blob, from_rank):
        self.names.append(name)
        self.answer(req, name, body, blob, from_rank)

    def echo(self, req, name, body, blob, from_rank):
        self.client.reply(req, {"rank": self.welcome.rank, "from": from_rank, **body}, blob[::-1])

    def begin(self):
        self.welcome = self.client.wait_welcome(DEADLINE_S)
        return self.welcome

    def event(self, kind):
        """The next event, which must be of ``kind``."""
        event = self.events.get(timeout=DEADLINE_S)
        assert isinstance(event, kind), event
        return event


class Job:
    """A scheduler on a thread, and clients."""

    def __init__(self, new_port, **settings):
        self.new_port = new_port
        self.settings = Settings(**{"num_workers": 2, "num_servers": 2, **settings})
        self.lines = []
        port = new_port()
        self.address = port.listen(Channel.CONTROL, LOCAL)
        self.flag = StopFlag(port)
        self.nodes = []
        self.workers = []
        self.servers = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.scheduler = self._pool.submit(
            serve_on, port, self.settings, flag=self.flag, say=self.lines.append
        )

    def node(self, role, settings=None, **fields):
        node = Node(self.new_port(), self.address, settings or self.settings, role, **fields)
        self.nodes.append(node)
        return node

    def begin(self, **fields):
        """Start everybody and wait until the workers are welcome."""
        self.workers = [
            self.node(WORKER, worker_id=rank, **fields) for rank in range(self.settings.num_workers)
        ]
        self.servers = [self.node(SERVER) for _ in range(self.settings.num_servers)]
        for node in self.servers:
            node.begin()
            node.client.ready()
        self.servers.sort(key=lambda node: node.welcome.rank)
        for node in self.workers:
            node.begin()
        return self

    def exit_code(self):
        return self.scheduler.result(DEADLINE_S)

    def close(self):
        self.flag.stop("the test is over")
        for node in self.nodes:
            node.client.close()
        self.scheduler.exception(DEADLINE_S)
        self._pool.shutdown()


@pytest.fixture(params=["inproc", "zmq"])
def new_port(request):
    """A factory of ports that can reach each other."""
    if request.param == "inproc":
        network = InprocNetwork()
        return lambda: InprocPort(network)
    keys = derive(b"a secret")
    return lambda: ZmqPort(keys)


@pytest.fixture
def new_job(new_port):
    """A factory of jobs, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            job = Job(new_port, **settings)
            stack.callback(job.close)
            return job

        yield make
    assert not [thread for thread in threading.enumerate() if thread.name == "p3-control"]


def register_by_hand(port, settings, address, role=WORKER):
    """Register as a client that will never send another message."""
    node = Registration(role, LOCAL)
    port.connect(Channel.CONTROL, b"scheduler", address, b"by hand")
    body = {
        "kind": "register",
        "role": role,
        "worker_id": None,
        "host": node.host,
        "pid": node.pid,
        "addresses": {"data": "", "credit": ""},
        "agreed": settings.agreed(),
        "version": node.version,
    }
    port.send(Channel.CONTROL, b"scheduler", encode(body))


# ---- a whole job


def test_a_job_from_registration_to_the_end(new_job):
    job = new_job().begin()
    for rank, node in enumerate(job.workers):
        assert node.welcome.rank == rank
        assert [info.rank for info in node.welcome.servers] == [0, 1]
        assert {info.data for info in node.welcome.servers} == {"data!"}
        assert node.welcome.num_workers == node.welcome.num_servers == 2
    for rank, node in enumerate(job.servers):
        assert node.welcome.rank == rank
        tokens = [info.token for info in node.welcome.workers]
        assert tokens == [worker.welcome.token for worker in job.workers]
        assert all(len(token) == 16 for token in tokens)
    first, second = (node.client for node in job.workers)

    answers = first.ask("hello", {"n": 1}, b"abc").result(DEADLINE_S)
    assert answers == [
        ({"rank": 0, "from": 0, "n": 1}, b"cba"),
        ({"rank": 1, "from": 0, "n": 1}, b"cba"),
    ]
    waiting = [first.declare(0, key, (100_000,), "float32", "sync", False) for key in "abc"]
    waiting += [second.declare(0, key, (100_000,), "float32", "sync", False) for key in "cba"]
    entries = [future.result(DEADLINE_S) for future in waiting]
    assert entries[:3] == entries[:2:-1]
    assert [entry.key for entry in entries[:3]] == ["a", "b", "c"]
    assert sorted(entry.id for entry in entries[:3]) == [0, 1, 2]
    assert entries[0].shape == (100_000,)
    assert job.servers[1].names == ["hello", "key", "key", "key"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(client.barrier, DEADLINE_S) for client in (first, second)]:
            future.result(DEADLINE_S)
    first.order(0, ["b", 1])
    for node in job.workers:
        assert node.event(Order) == Order(0, ("b", 1))

    for node in job.workers:
        node.client.goodbye(DEADLINE_S)
        node.client.close()
    for node in job.servers:
        node.event(Stop)
        node.client.goodbye(DEADLINE_S)
        node.client.close()
    assert job.exit_code() == 0
    assert job.lines == []


def test_a_scheduler_that_comes_last(new_port):
    """Clients that start before the scheduler listens find it when it does."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        number = probe.getsockname()[1]
    port = new_port()
    kind = "tcp" if isinstance(port, ZmqPort) else "inproc"
    address = f"tcp://{LOCAL}:{number}" if kind == "tcp" else f"inproc://{number}"
    settings = Settings(num_workers=1, num_servers=1)
    nodes = [Node(new_port(), address, settings, role) for role in (WORKER, SERVER)]
    flag = StopFlag(port)
    port.listen(Channel.CONTROL, LOCAL, number)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scheduler = pool.submit(serve_on, port, settings, flag=flag, say=lambda line: None)
        nodes[1].begin()
        nodes[1].client.ready()
        assert nodes[0].begin().rank == 0
        flag.stop("enough")
        assert scheduler.result(DEADLINE_S) == 1
    for node in nodes:
        assert node.event(PeerFailed).reason == "enough"
        node.client.close()


# ---- the start goes wrong


def test_who_is_missing_is_named(new_job):
    job = new_job()
    node = job.node(WORKER, worker_id=1)
    job.node(SERVER)
    text = wait_missing(node, "1 server")
    assert "still misses 1 worker (rank 0), 1 server" in text
    assert job.address in text


def wait_missing(node, words):
    """Wait until ``node`` is told that ``words`` are missing; return the error's text."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with pytest.raises(PeerError) as caught:
            node.client.wait_welcome(0.1)
        if words in str(caught.value):
            return str(caught.value)
    raise AssertionError(caught.value)


def test_a_scheduler_that_never_answers_is_named(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    node = Node(new_port(), address, Settings(), WORKER)
    with pytest.raises(PeerError, match="no answer from the scheduler at") as caught:
        node.client.wait_welcome(0.2)
    assert address in str(caught.value)
    assert "P3_SECRET" in str(caught.value)
    node.client.close()
    port.close()


def test_a_duplicate_rank_is_refused(new_job):
    job = new_job()
    wait_missing(job.node(WORKER, worker_id=1), "rank 0")
    second = job.node(WORKER, worker_id=1)
    with pytest.raises(UsageError, match="worker_id 1 is taken"):
        second.client.wait_welcome(DEADLINE_S)
    with pytest.raises(UsageError, match="taken"):
        second.client.ask("x", {}).result(DEADLINE_S)


def test_other_settings_are_refused(new_job):
    job = new_job()
    node = job.node(WORKER, settings=Settings(num_workers=2, num_servers=2, slice_elems=7))
    with pytest.raises(UsageError, match=r"slice_elems is 7 here and 50000 .* P3_SLICE_ELEMS"):
        node.client.wait_welcome(DEADLINE_S)


def test_the_scheduler_gives_up_on_the_start(new_job):
    job = new_job(start_timeout_s=0.5)
    node = job.node(SERVER)
    event = node.event(PeerFailed)
    assert "missing 2 workers, 1 server" in event.reason
    with pytest.raises(PeerError, match="missing 2 workers, 1 server") as caught:
        node.client.wait_welcome(DEADLINE_S)
    assert caught.value.role == SCHEDULER
    assert job.exit_code() == 1
    assert len(job.lines) == 1
    assert "missing 2 workers, 1 server" in job.lines[0]


# ---- keys


def test_a_shape_mismatch_reaches_both_ranks(new_job):
    job = new_job().begin()
    first, second = job.workers
    first.client.declare(0, "w", (2, 3), "float32", "sync", False).result(DEADLINE_S)
    future = second.client.declare(0, "w", (3, 2), "float32", "sync", False)
    with pytest.raises(PeerError) as caught:
        future.result(DEADLINE_S)
    event = first.event(KeyFailed)
    assert (event.space, event.key) == (0, "w")
    assert event.reason == str(caught.value)
    for word in ("key 'w'", "rank 0", "(2, 3)", "rank 1", "(3, 2)"):
        assert word in event.reason


def test_a_key_that_nobody_could_store(new_job):
    job = new_job().begin()
    future = job.workers[0].client.declare(0, "w", (1,), "elephant", "sync", False)
    with pytest.raises(UsageError, match="elephant"):
        future.result(DEADLINE_S)


# ---- commands


def test_a_servers_error_reaches_the_worker(new_job):
    job = new_job().begin()

    def refuse(req, name, body, blob, from_rank):
        job.servers[1].client.reply(req, {}, error="no such optimizer")

    def explode(req, name, body, blob, from_rank):
        raise KeyError("lost")

    job.servers[1].answer = refuse
    with pytest.raises(PeerError, match=r"^server 1: no such optimizer$"):
        job.workers[0].client.ask("optimizer", {}).result(DEADLINE_S)
    job.servers[1].answer = explode
    with pytest.raises(PeerError, match="server 1: optimizer: KeyError: 'lost'"):
        job.workers[0].client.ask("optimizer", {}).result(DEADLINE_S)


def test_answers_may_come_later_from_other_threads_and_in_any_order(new_job):
    job = new_job(num_servers=1).begin()
    server, client = job.servers[0], job.workers[0].client
    asked = queue.Queue()
    server.answer = lambda req, *rest: asked.put(req)
    futures = [client.ask("slow", {"n": n}) for n in range(3)]
    numbers = [asked.get(timeout=DEADLINE_S) for _ in range(3)]
    for n in (2, 0, 1):
        server.client.reply(numbers[n], {"n": n})
        assert futures[n].result(DEADLINE_S) == [({"n": n}, b"")]


def test_a_body_that_is_no_json_raises_at_once(new_job):
    job = new_job(num_workers=1, num_servers=1).begin()
    with pytest.raises(TypeError):
        job.workers[0].client.ask("x", {"a": object()})


def test_blobs_of_megabytes(new_job):
    job = new_job(num_workers=1).begin()
    blob = os.urandom(1 << 22)
    answers = job.workers[0].client.ask("big", {}, blob).result(DEADLINE_S)
    assert [answer for _, answer in answers] == [blob[::-1], blob[::-1]]


# ---- barrier


def test_a_late_barrier_names_who_is_missing(new_job):
    job = new_job().begin()
    with pytest.raises(PeerError, match=r"waited 0.1 s: ranks \[0\] wait for ranks \[1\]"):
        job.workers[0].client.barrier(0.1)


def test_a_barrier_ends_when_somebody_has_left(new_job):
    job = new_job().begin()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.workers[0].client.barrier)
        while "ranks [0]" not in job.workers[1].client._who_is_late():
            assert not waiting.done()
        job.workers[1].client.goodbye(DEADLINE_S)
        with pytest.raises(PeerError, match=r"worker 1 .* has ended"):
            waiting.result(DEADLINE_S)


def test_many_barriers_are_quick(new_job):
    """Each is a round trip that starts with a wake-up: none may be lost."""
    job = new_job(num_servers=1).begin()

    def work(node):
        for _ in range(100):
            node.client.barrier(DEADLINE_S)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = concurrent.futures.wait([pool.submit(work, n) for n in job.workers], DEADLINE_S)
    assert [future.exception() for future in done.done] == [None, None]


# ---- failures


def test_a_failing_worker_is_named_to_everybody(new_job):
    job = new_job().begin()
    first, second = job.workers
    silence(job.servers)
    waiting = first.client.ask("never answered", {})
    second.client.fail("ValueError: bad data")
    for node in (first, *job.servers):
        event = node.event(PeerFailed)
        assert event == PeerFailed(WORKER, 1, LOCAL, "ValueError: bad data")
    for future in (waiting, first.client.ask("too late", {})):
        with pytest.raises(PeerError, match=r"worker 1 .*: ValueError: bad data") as caught:
            future.result(DEADLINE_S)
        assert (caught.value.role, caught.value.rank) == (WORKER, 1)
    with pytest.raises(PeerError, match="bad data"):
        first.client.barrier()
    with pytest.raises(PeerError, match="bad data"):
        first.client.goodbye(DEADLINE_S)
    assert second.events.empty()
    assert job.exit_code() == 1
    assert "worker 1" in job.lines[0]


def silence(servers):
    for node in servers:
        node.answer = lambda *command: None


def test_failing_ends_ones_own_waits(new_job):
    job = new_job().begin()
    silence(job.servers)
    client = job.workers[0].client
    waiting = client.ask("never answered", {})
    client.fail("I am out of memory")
    client.fail("and once more")
    with pytest.raises(PeerError, match=r"worker 0 .* out of memory"):
        waiting.result(DEADLINE_S)


def test_a_silent_client_is_named_to_everybody(new_job, new_port):
    job = new_job(num_workers=1, num_servers=2, heartbeat_timeout_s=2.0)
    port = job.new_port()
    register_by_hand(port, job.settings, job.address, SERVER)
    decode(wait_for(port, "waiting"))
    server = job.node(SERVER)
    worker = job.node(WORKER)
    server.begin()
    event = worker.event(PeerFailed)
    assert (event.role, event.rank) == (SERVER, 0)
    assert "not heard for 2 s" in event.reason
    assert server.event(PeerFailed) == event
    assert job.exit_code() == 1
    port.close()


def wait_for(port, kind):
    """The frames of the next message of a kind at a raw port."""
    for _ in range(300):
        for message in port.recv(0.1):
            if decode(message.frames)[0]["kind"] == kind:
                return message.frames
    raise AssertionError(f"no {kind}")


def test_live_clients_outlive_the_timeout(new_job):
    job = new_job(num_workers=1, num_servers=1, heartbeat_timeout_s=1.0).begin()
    with pytest.raises(queue.Empty):
        job.workers[0].events.get(timeout=2.5)
    assert job.workers[0].client.ask("x", {}).result(DEADLINE_S)


def test_a_scheduler_that_falls_silent_is_noticed(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    settings = Settings(heartbeat_timeout_s=1.0)
    node = Node(new_port(), address, settings, WORKER)
    (message,) = port.recv(DEADLINE_S)
    port.send(Channel.CONTROL, message.peer, encode({"kind": "waiting", "missing": "1 server"}))
    event = node.event(PeerFailed)
    assert (event.role, event.rank) == (SCHEDULER, None)
    assert address in event.reason
    with pytest.raises(PeerError, match="scheduler"):
        node.client.wait_welcome(DEADLINE_S)
    node.client.close()
    port.close()


def test_a_callback_that_raises_fails_the_job(new_job):
    job = new_job().begin()
    job.workers[1].on_event = lambda event: 1 // 0
    job.workers[0].client.order(0, ["a"])
    event = job.servers[0].event(PeerFailed)
    assert (event.role, event.rank) == (WORKER, 1)
    assert "ZeroDivisionError" in event.reason


def test_nonsense_from_a_stranger_changes_nothing(new_job):
    job = new_job(num_workers=1).begin()
    port = job.new_port()
    port.connect(Channel.CONTROL, b"scheduler", job.address, b"stranger")
    for frames in ([b""], [b"{}", b""], [b"[", b"", b""], [b'{"kind":"goodbye"}', b""]):
        port.send(Channel.CONTROL, b"scheduler", frames)
    port_2 = job.new_port()
    register_by_hand(port_2, job.settings, job.address)
    assert "has started" in decode(wait_for(port_2, "refused"))[0]["reason"]
    assert job.workers[0].client.ask("x", {}).result(DEADLINE_S)
    port.close()
    port_2.close()


def test_nonsense_from_the_scheduler_is_dropped(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    node = Node(new_port(), address, Settings(), WORKER)
    (message,) = port.recv(DEADLINE_S)
    for frames in (
        [b"x", b""],
        encode({"kind": "welcome", "rank": "no"}),
        encode({"kind": "reply", "req": 5}),
        encode({"kind": "dance"}),
        encode({"kind": "command", "req": 1}),
        encode({"kind": "refused", "reason": "go away"}),
    ):
        port.send(Channel.CONTROL, message.peer, frames)
    with pytest.raises(UsageError, match="go away"):
        node.client.wait_welcome(DEADLINE_S)
    node.client.close()
    port.close()


# ---- the client's own rules


def test_close_ends_everything(new_job):
    job = new_job().begin()
    silence(job.servers)
    client = job.workers[0].client
    waiting = client.ask("never answered", {})
    client.close()
    client.close()
    for future in (waiting, client.ask("too late", {})):
        with pytest.raises(UsageError, match="closed"):
            future.result(DEADLINE_S)


def test_close_without_start(new_port):
    node = ControlClient(new_port(), "", Settings(), Registration(WORKER, ""), print, print)
    node.close()


def test_blocking_calls_refuse_the_control_thread(new_job):
    job = new_job(num_workers=1, num_servers=1).begin()
    client = job.workers[0].client
    caught = queue.Queue()

    def on_event(event):
        for call in (client.barrier, lambda: client.goodbye(1), lambda: client.wait_welcome(1)):
            try:
                call()
            except InternalError as error:
                caught.put(str(error))

    job.workers[0].on_event = on_event
    client.order(0, [])
    for _ in range(3):
        assert "control thread" in caught.get(timeout=DEADLINE_S)


def test_a_forked_child_finds_it_inert(new_job):
    job = new_job(num_workers=1, num_servers=1).begin()
    client = job.workers[0].client
    pid = os.fork()
    if pid == 0:  # the child: report by exit code only
        code = 1
        try:
            client.goodbye(DEADLINE_S)
            client.fail("not I")
            client.order(0, [])
            client.reply(0, {})
            client.ready()
            client.close()
            for call in (client.barrier, lambda: client.ask("x", {})):
                try:
                    call()
                except UsageError:
                    code = 0
                else:
                    code = 2
                    break
        finally:
            os._exit(code)
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 0
    assert client.ask("x", {}).result(DEADLINE_S)


# ---- the process


SERVE = """
import sys
from p3.config import Settings
from p3.scheduler.process import serve
sys.exit(serve(Settings(root_port=int(sys.argv[1]), start_timeout_s=float(sys.argv[2]))))
"""


@contextlib.contextmanager
def scheduler_process(start_timeout_s):
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        number = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(number), str(start_timeout_s)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"tcp://{LOCAL}:{number}"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_fail_the_job(number):
    with scheduler_process(60) as (process, address):
        node = Node(ZmqPort(derive(None)), address, Settings(), WORKER)
        wait_missing(node, "1 server")
        process.send_signal(number)
        event = node.event(PeerFailed)
        assert (event.role, event.reason) == (SCHEDULER, "the scheduler was stopped")
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr.read() == "p3 scheduler: the scheduler was stopped\n"
        node.client.close()


def test_the_process_says_who_is_missing():
    with scheduler_process(0.2) as (process, _):
        assert process.wait(DEADLINE_S) == 1
        (line,) = process.stderr.read().splitlines()
        assert "missing 1 worker, 1 server" in line


def test_an_address_that_cannot_be_bound():
    with pytest.raises(UsageError, match=r"no\.such\.host\.invalid"):
        serve(Settings(root_host="no.such.host.invalid"))
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        with pytest.raises(UsageError, match=str(taken.getsockname()[1])):
            serve(Settings(root_port=taken.getsockname()[1]))
