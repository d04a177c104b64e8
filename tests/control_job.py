"""Clients and a scheduler on a thread, over either transport; and clients by hand."""

import concurrent.futures
import queue
import time

import pytest

from p3.config import SERVER, WORKER, Settings
from p3.control import ControlClient, Registration
from p3.errors import PeerError
from p3.scheduler.messages import decode, encode
from p3.scheduler.process import StopFlag, serve_on
from p3.transport import Channel

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


def wait_missing(node, words):
    """Wait until ``node`` is told that ``words`` are missing; return the error's text."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with pytest.raises(PeerError) as caught:
            node.client.wait_welcome(0.1)
        if words in str(caught.value):
            return str(caught.value)
    raise AssertionError(caught.value)


def wait_for(port, kind):
    """The frames of the next message of a kind at a raw port."""
    for _ in range(300):
        for message in port.recv(0.1):
            if decode(message.frames)[0]["kind"] == kind:
                return message.frames
    raise AssertionError(f"no {kind}")


def silence(servers):
    for node in servers:
        node.answer = lambda *command: None
