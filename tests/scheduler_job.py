"""A job for the tests of the scheduler's state machine: messages and a clock go in and out."""

import itertools
import json

from p3.config import Settings
from p3.scheduler.messages import decode, encode
from p3.scheduler.state import SchedulerState


class Job:
    """A scheduler without a network: keeps what each peer was sent last."""

    def __init__(self, workers=2, servers=2, **settings):
        self.settings = Settings(num_workers=workers, num_servers=servers, **settings)
        tokens = itertools.count(1)
        self.state = SchedulerState(
            self.settings, 0.0, lambda: bytes([next(tokens)]) * 16, version="7"
        )
        self.now = 0.0
        self.got = {}

    def registration(self, role, **fields):
        number = {"worker": 1, "server": 2}[role]
        return {
            "kind": "register",
            "role": role,
            "worker_id": None,
            "host": f"10.0.0.{number}",
            "pid": 40 + number,
            "addresses": {"data": "tcp://d", "credit": "tcp://c"} if role == "server" else {},
            "agreed": self.settings.agreed(),
            "version": "7",
            **fields,
        }

    def register(self, peer, role=None, **fields):
        role = role or {"w": "worker", "s": "server"}[peer[0]]
        return self.send(peer, **self.registration(role, **fields))

    def send(self, peer, kind, blob=b"", **fields):
        return self.deliver(
            self.state.handle(peer.encode(), self._wire(kind, fields), blob, self.now)
        )

    def tick(self, seconds, alive=()):
        """Let time pass in small steps, while ``alive`` send heartbeats."""
        sends = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for peer in alive:
                self.state.handle(peer.encode(), {"kind": "heartbeat"}, b"", self.now)
            sends += self.deliver(self.state.tick(self.now))
        return sends

    def deliver(self, sends):
        out = []
        for send in sends:
            body, blob = decode(encode(send.body, send.blob))
            self.got.setdefault(send.peer.decode(), []).append((body, blob))
            out.append((send.peer.decode(), body["kind"]))
        return out

    def last(self, peer, kind):
        """The newest message of a kind that ``peer`` was sent."""
        return [body for body, _ in self.got.get(peer, []) if body["kind"] == kind][-1]

    def kinds(self, peer):
        return [body["kind"] for body, _ in self.got.get(peer, [])]

    def begin(self):
        """Bring everybody to the welcome: workers w0.. and servers s0.., ranks as numbered."""
        for number in range(self.settings.num_workers):
            self.register(f"w{number}", worker_id=number)
        for number in range(self.settings.num_servers):
            self.register(f"s{number}")
        for number in range(self.settings.num_servers):
            self.send(f"s{number}", "ready")
        self.got.clear()
        return self

    def declare(self, peer, req, key="a", shape=(2, 3), dtype="float32", whole=False, **fields):
        fields = {"mode": "sync", "space": 0, **fields}
        return self.send(
            peer, "declare", req=req, key=key, shape=shape, dtype=dtype, whole=whole, **fields
        )

    def answer_commands(self, *servers, error=None):
        """Each of ``servers`` answers the newest command that it was sent."""
        for server in servers:
            req = self.last(server, "command")["req"]
            self.send(server, "reply", req=req, body={"from": server}, error=error)

    def _wire(self, kind, fields):
        return json.loads(json.dumps({"kind": kind, **fields}))
