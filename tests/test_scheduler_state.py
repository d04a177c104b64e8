"""The scheduler's state machine, bare: messages and a clock go in, messages come out."""

import itertools
import json
import random

import pytest

from p3.config import Settings
from p3.scheduler.liveness import Liveness
from p3.scheduler.messages import Malformed, decode, encode, join_blobs, split_blobs
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


# ---- the start


def test_ranks_by_worker_id_and_welcomes_in_two_steps():
    job = Job()
    assert job.register("wa", worker_id=1) == [("wa", "waiting")]
    job.register("sa")
    job.register("wb", worker_id=0)
    assert job.last("wa", "waiting")["missing"] == "1 server"
    sends = job.register("sb", host="10.0.0.9")
    assert [send for send in sends if send[1] == "welcome"] == [
        ("sa", "welcome"),
        ("sb", "welcome"),
    ]
    welcome = job.last("sb", "welcome")
    assert welcome["rank"] == 1
    assert (welcome["num_workers"], welcome["num_servers"]) == (2, 2)
    assert welcome["workers"] == [
        {"rank": 0, "token": "01" * 16, "host": "10.0.0.1"},
        {"rank": 1, "token": "02" * 16, "host": "10.0.0.1"},
    ]
    assert "welcome" not in job.kinds("wa")
    job.send("sa", "ready")
    assert "welcome" not in job.kinds("wa")
    assert job.last("wa", "waiting")["missing"] == "1 server registered but not ready (rank 1)"
    assert job.send("sb", "ready") == [("wb", "welcome"), ("wa", "welcome")]
    welcome = job.last("wa", "welcome")
    assert welcome["rank"] == 1
    assert welcome["token"] == "02" * 16
    assert welcome["servers"] == [
        {"rank": 0, "data": "tcp://d", "credit": "tcp://c", "host": "10.0.0.2"},
        {"rank": 1, "data": "tcp://d", "credit": "tcp://c", "host": "10.0.0.9"},
    ]


def test_ranks_by_arrival_around_those_that_are_given():
    job = Job(workers=4, servers=1)
    job.register("wa")
    job.register("wb", worker_id=0)
    job.register("wc")
    job.register("wd", worker_id=2)
    job.register("s")
    job.send("s", "ready")
    ranks = {peer: job.last(peer, "welcome")["rank"] for peer in ("wa", "wb", "wc", "wd")}
    assert ranks == {"wa": 1, "wb": 0, "wc": 3, "wd": 2}


def test_missing_names_ranks_where_they_are_known():
    job = Job(workers=3, servers=2)
    job.register("s")
    assert job.last("s", "waiting")["missing"] == "3 workers, 1 server"
    job.register("w1", worker_id=1)
    assert job.last("s", "waiting")["missing"] == "2 workers (ranks 0, 2), 1 server"
    job.register("w0", worker_id=0)
    assert job.last("w1", "waiting")["missing"] == "1 worker (rank 2), 1 server"
    job.register("s2")
    assert job.last("w0", "waiting")["missing"] == "1 worker (rank 2)"


def test_missing_lists_the_first_of_many_ranks():
    job = Job(workers=30, servers=1)
    job.register("w", worker_id=0)
    ranks = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 21 more"
    assert job.last("w", "waiting")["missing"] == f"29 workers ({ranks}), 1 server"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "8"}, ["version", "'8'", "'7'"]),
        ({"agreed": {"slice_elems": 9}}, ["encrypt", "None", "False", "P3_ENCRYPT"]),
        ({"worker_id": 0}, ["worker_id 0", "taken", "10.0.0.1", "pid 41"]),
        ({"worker_id": 2}, ["worker_id 2", "from 0 to 1", "DMLC_WORKER_ID"]),
    ],
)
def test_refused_registrations(fields, words):
    job = Job()
    job.register("w0", worker_id=0)
    assert job.register("wx", **fields) == [("wx", "refused")]
    reason = job.last("wx", "refused")["reason"]
    assert all(word in reason for word in words), reason
    assert "wx" not in repr(job.state)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slice_elems", 100, ["slice_elems", "100", "50000", "P3_SLICE_ELEMS"]),
        ("num_workers", 3, ["num_workers", "3", "2", "DMLC_NUM_WORKER"]),
        ("later_setting", 1, ["later_setting", "1", "None"]),
    ],
)
def test_settings_that_differ_are_refused(name, value, words):
    job = Job()
    job.register("w0", agreed={**job.settings.agreed(), name: value})
    reason = job.last("w0", "refused")["reason"]
    assert all(word in reason for word in words), reason


def test_more_than_expected_are_refused():
    job = Job(workers=1, servers=2)
    job.register("w0")
    job.register("wx")
    assert "1 worker and all are there" in job.last("wx", "refused")["reason"]


def test_a_late_registration_is_refused():
    job = Job().begin()
    job.register("wx")
    assert "has started" in job.last("wx", "refused")["reason"]
    job.send("w0", "fail", reason="boom")
    job.register("wy")
    assert "boom" in job.last("wy", "refused")["reason"]


def test_the_job_gives_up_on_its_start_and_names_who_is_missing():
    job = Job(start_timeout_s=20)
    job.register("w1", worker_id=1)
    job.tick(19, alive=["w1"])
    assert job.state.exit_code is None
    job.tick(2, alive=["w1"])
    assert job.state.exit_code == 1
    assert "1 worker (rank 0), 2 servers" in job.state.failure
    assert "20 s" in job.state.failure
    assert job.last("w1", "failed")["role"] == "scheduler"


def test_the_job_gives_up_on_servers_that_never_get_ready():
    job = Job(start_timeout_s=20)
    peers = ["w0", "w1", "s0", "s1"]
    for peer in peers:
        job.register(peer)
    job.send("s1", "ready")
    job.tick(21, alive=peers)
    assert "1 server registered but not ready (rank 0)" in job.state.failure


def test_a_client_that_dies_before_the_welcome_frees_its_place():
    job = Job(workers=2, servers=1, heartbeat_timeout_s=5)
    job.register("w0", worker_id=0)
    job.register("wx", worker_id=1)
    job.tick(6, alive=["w0"])
    assert job.state.exit_code is None
    assert job.last("w0", "waiting")["missing"] == "1 worker (rank 1), 1 server"
    assert "not heard for 5 s" in job.last("wx", "refused")["reason"]
    job.register("w1", worker_id=1)
    job.register("s0")
    job.send("s0", "ready")
    assert job.last("w1", "welcome")["rank"] == 1
    assert "welcome" not in job.kinds("wx")


def test_goodbye_before_the_welcome_frees_the_place():
    job = Job()
    job.register("w0", worker_id=0)
    job.register("w1", worker_id=1)
    assert job.send("w1", "goodbye") == [("w1", "bye"), ("w0", "waiting")]
    assert "rank 1" in job.last("w0", "waiting")["missing"]


def test_default_tokens_are_random_and_do_not_begin_with_zero():
    from p3.scheduler.messages import new_token

    tokens = {new_token() for _ in range(2000)}
    assert len(tokens) == 2000
    assert all(len(token) == 16 and token[0] for token in tokens)


# ---- commands


def test_ask_goes_to_every_server_and_back_when_all_have_answered():
    job = Job().begin()
    assert job.send("w1", "ask", blob=b"pickle", req=5, name="optimizer", body={"lr": 1}) == [
        ("s0", "command"),
        ("s1", "command"),
    ]
    command, blob = job.got["s1"][-1]
    assert blob == b"pickle"
    assert (command["name"], command["body"], command["from_rank"]) == ("optimizer", {"lr": 1}, 1)
    req = command["req"]
    assert job.send("s1", "reply", blob=b"one", req=req, body={"n": 1}, error=None) == []
    assert job.send("s0", "reply", blob=b"zero!", req=req, body={"n": 0}) == [("w1", "reply")]
    reply, blob = job.got["w1"][-1]
    assert (reply["req"], reply["error"], reply["bodies"]) == (5, None, [{"n": 0}, {"n": 1}])
    assert split_blobs(reply["sizes_bytes"], blob) == [b"zero!", b"one"]


def test_requests_of_two_workers_with_one_number_are_kept_apart():
    job = Job(servers=1).begin()
    job.send("w0", "ask", req=0, name="x", body={})
    job.send("w1", "ask", req=0, name="x", body={})
    first, second = (body["req"] for body, _ in job.got["s0"])
    job.send("s0", "reply", req=second, body={"for": 1})
    job.send("s0", "reply", req=first, body={"for": 0})
    assert job.last("w0", "reply")["bodies"] == [{"for": 0}]
    assert job.last("w1", "reply")["bodies"] == [{"for": 1}]


def test_a_servers_error_names_the_server():
    job = Job().begin()
    job.send("w0", "ask", req=1, name="x", body={})
    job.answer_commands("s0")
    job.answer_commands("s1", error="no such optimizer")
    assert job.last("w0", "reply")["error"] == "server 1: no such optimizer"


def test_answers_nobody_waits_for_are_dropped():
    job = Job().begin()
    job.send("w0", "ask", req=1, name="x", body={})
    job.answer_commands("s0", "s0")
    job.send("s1", "reply", req=99, body={})
    assert job.state.dropped == 2
    assert "reply" not in job.kinds("w0")
    job.answer_commands("s1")
    assert job.last("w0", "reply")["error"] is None


# ---- keys


def test_the_first_declaration_decides_and_all_ranks_get_the_same():
    job = Job().begin()
    assert job.declare("w1", 0) == [("s0", "command"), ("s1", "command")]
    command = job.last("s0", "command")
    assert (command["name"], command["from_rank"]) == ("key", 1)
    assert command["body"] == {
        "id": 0,
        "space": 0,
        "key": "a",
        "shape": [2, 3],
        "dtype": "float32",
        "mode": "sync",
        "whole": False,
        "first": 0,
    }
    assert job.declare("w0", 7) == []  # waits for the servers too
    job.answer_commands("s0")
    assert "reply" not in job.kinds("w1")
    job.answer_commands("s1")
    fields = {"kind": "reply", "error": None, "fault": "peer", "id": 0, "first": 0, "whole": False}
    assert job.last("w1", "reply") == {**fields, "req": 0}
    assert job.last("w0", "reply") == {**fields, "req": 7}
    assert job.declare("w0", 8) == [("w0", "reply")]  # once more, known by now


def test_numbers_are_dense_and_places_balanced_whatever_the_order():
    job = Job().begin()
    for number, (peer, key) in enumerate([("w0", 2), ("w1", 4), ("w0", 4), ("w1", 2), ("w0", 6)]):
        job.declare(peer, number, key=key)
        job.answer_commands("s0", "s1") if (peer, key) not in [("w0", 4), ("w1", 2)] else None
    places = {}
    for peer in ("w0", "w1"):
        for body, _ in job.got[peer]:
            places.setdefault(body["id"], set()).add(body["first"])
    assert places == {0: {0}, 1: {1}, 2: {0}}


def test_keys_of_other_spaces_and_types_are_other_keys():
    job = Job().begin()
    for number, fields in enumerate([{"key": 3}, {"key": "3"}, {"key": 3, "space": 1}]):
        job.declare("w0", number, **fields)
        job.answer_commands("s0", "s1")
    assert [body["id"] for body, _ in job.got["w0"]] == [0, 1, 2]


@pytest.mark.parametrize(
    "fields",
    [{"shape": (3, 2)}, {"dtype": "float16"}, {"mode": "async"}, {"whole": True}],
)
def test_a_disagreement_reaches_everybody_who_declared_the_key(fields):
    job = Job(workers=3).begin()
    job.declare("w0", 0)
    job.answer_commands("s0", "s1")
    job.got.clear()
    assert job.declare("w2", 4, **fields) == [("w0", "key_failed"), ("w2", "reply")]
    event, reply = job.last("w0", "key_failed"), job.last("w2", "reply")
    assert (event["space"], event["key"]) == (0, "a")
    assert event["reason"] == reply["error"]
    different = str(next(iter(fields.values())))
    for word in (
        "'a'",
        "rank 0",
        "rank 2",
        "(2, 3)",
        "whole" if different == "True" else different,
    ):
        assert word in event["reason"]
    assert job.declare("w1", 1) == [("w1", "reply")]  # nobody can use it any more
    assert job.last("w1", "reply")["error"] == event["reason"]


def test_a_disagreement_before_the_servers_know_ends_all_waits():
    job = Job().begin()
    job.declare("w0", 0)
    sends = job.declare("w1", 0, shape=(9,))
    assert sends == [("w0", "key_failed"), ("w0", "reply"), ("w1", "reply")]
    job.answer_commands("s0", "s1")
    assert job.kinds("w0") == ["key_failed", "reply"]


def test_a_key_that_one_rank_cannot_go_on_with_fails_on_all():
    job = Job().begin()
    job.declare("w0", 0)
    job.answer_commands("s0", "s1")
    sends = job.send("w0", "fail_key", space=0, key="a", reason="rank 0: no memory")
    assert sends == [("w0", "key_failed")]
    assert job.last("w0", "key_failed")["reason"] == "rank 0: no memory"
    assert job.send("w0", "fail_key", space=0, key="a", reason="again") == []
    job.declare("w1", 3)  # later than the failure
    assert job.last("w1", "reply")["error"] == "rank 0: no memory"


def test_nobody_can_fail_a_key_that_is_not_there():
    job = Job().begin()
    assert job.send("w0", "fail_key", space=0, key="b", reason="x") == []
    assert job.state.dropped == 1


def test_one_rank_that_declares_a_key_twice_differently():
    job = Job().begin()
    job.declare("w0", 0)
    job.answer_commands("s0", "s1")
    job.declare("w0", 1, shape=(4,))
    assert "rank 0 declared it with shape (2, 3)" in job.last("w0", "reply")["error"]
    assert "then with shape (4,)" in job.last("w0", "reply")["error"]


def test_a_server_that_refuses_a_key():
    job = Job().begin()
    job.declare("w0", 0)
    job.declare("w1", 0)
    job.answer_commands("s0")
    job.answer_commands("s1", error="out of memory")
    for peer in ("w0", "w1"):
        assert "server 1: out of memory" in job.last(peer, "reply")["error"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"dtype": "elephant"}, "elephant"),
        ({"dtype": "O"}, "real numbers"),
        ({"dtype": "float32,float32"}, "real numbers"),
        ({"shape": (2**62, 2**62)}, "P3_SLICE_ELEMS"),
    ],
)
def test_impossible_keys_are_answered_with_the_reason(fields, word):
    job = Job().begin()
    assert job.declare("w0", 3, **fields) == [("w0", "reply")]
    reply = job.last("w0", "reply")
    assert (reply["req"], reply["fault"]) == (3, "usage")
    assert word in reply["error"]


# ---- barrier, order


def test_barrier():
    job = Job(workers=3).begin()
    assert job.send("w0", "barrier", req=1) == []
    assert job.send("w2", "barrier", req=2) == []
    assert job.state.snapshot()["barrier"] == {"waiting": [0, 2], "absent": [1]}
    assert sorted(job.send("w1", "barrier", req=3)) == [(f"w{n}", "reply") for n in range(3)]
    assert [job.last(f"w{n}", "reply")["req"] for n in range(3)] == [1, 3, 2]


def test_a_rank_ahead_waits_at_the_next_barrier():
    job = Job().begin()
    job.send("w0", "barrier", req=1)
    job.send("w0", "barrier", req=2)
    assert sorted(job.send("w1", "barrier", req=1)) == [("w0", "reply"), ("w1", "reply")]
    assert job.last("w0", "reply")["req"] == 1
    job.send("w1", "barrier", req=2)
    assert job.last("w0", "reply")["req"] == 2


def test_a_barrier_that_somebody_will_never_reach():
    job = Job(workers=3).begin()
    job.send("w0", "barrier", req=1)
    assert job.send("w1", "goodbye") == [("w1", "bye"), ("w0", "reply")]
    assert "worker 1" in job.last("w0", "reply")["error"]
    job.send("w0", "barrier", req=2)  # from now on only those that are left count
    job.send("w2", "barrier", req=1)
    assert job.last("w0", "reply") == {"kind": "reply", "req": 2, "error": None, "fault": "peer"}


def test_order_goes_to_all_workers_and_comes_from_rank_0():
    job = Job().begin()
    assert job.send("w0", "order", space=1, keys=["b", 3]) == [("w0", "order"), ("w1", "order")]
    assert job.last("w1", "order") == {"kind": "order", "space": 1, "keys": ["b", 3]}
    assert job.send("w1", "order", space=1, keys=[]) == []
    assert job.state.dropped == 1


def test_status_tells_who_waits():
    job = Job().begin()
    job.send("w0", "ask", req=0, name="flush", body={})
    job.declare("w0", 1)
    job.send("w1", "barrier", req=0)
    job.send("w0", "status", req=2)
    status = job.last("w0", "reply")["status"]
    assert status["barrier"] == {"waiting": [1], "absent": [0]}
    assert status["commands"][0] == "0 flush: waits for servers [0, 1]"
    assert status["keys_unknown"] == ["key 'a' of store 0"]
    for text in ("running", "worker 1 (host 10.0.0.1, pid 41)", "flush"):
        assert text in repr(job.state)


# ---- the end


def test_goodbyes_stop_the_servers_and_end_the_job():
    job = Job().begin()
    assert job.send("w0", "goodbye") == [("w0", "bye")]
    job.tick(30, alive=["w1", "s0", "s1"])  # who said goodbye is not watched
    assert job.state.exit_code is None
    assert job.send("w1", "goodbye") == [("w1", "bye"), ("s0", "stop"), ("s1", "stop")]
    assert job.send("s0", "goodbye") == [("s0", "bye")]
    assert job.state.exit_code is None
    assert job.send("s1", "goodbye") == [("s1", "bye")]
    assert job.state.exit_code == 0
    assert job.state.failure is None


def test_servers_that_do_not_stop_are_not_waited_for():
    job = Job(heartbeat_timeout_s=5).begin()
    job.send("w0", "goodbye")
    job.send("w1", "goodbye")
    job.tick(4, alive=["s0"])
    assert job.state.exit_code is None
    job.tick(2, alive=["s0"])
    assert job.state.exit_code == 0


def test_workers_that_leave_at_once():
    job = Job()
    for peer in ("w0", "w1", "s0", "s1"):
        job.register(peer)
    job.send("w0", "goodbye")
    job.send("s0", "ready")
    assert job.send("w1", "goodbye") == [("w1", "bye"), ("s0", "stop"), ("s1", "stop")]
    assert job.send("s1", "ready") == []
    job.send("s1", "goodbye")
    job.send("s0", "goodbye")
    assert job.state.exit_code == 0


def test_a_server_that_leaves_too_early_fails_the_job():
    job = Job().begin()
    job.send("s1", "goodbye")
    assert job.state.exit_code == 1
    assert "before the workers were done" in job.last("w0", "failed")["reason"]


def test_heartbeats_are_answered():
    job = Job().begin()
    assert job.send("w0", "heartbeat") == [("w0", "heartbeat")]


@pytest.mark.parametrize(("dead", "role", "rank"), [("w1", "worker", 1), ("s0", "server", 0)])
def test_silence_fails_the_job_and_names_who(dead, role, rank):
    job = Job(heartbeat_timeout_s=5).begin()
    alive = [peer for peer in ("w0", "w1", "s0", "s1") if peer != dead]
    job.tick(4.5, alive)
    assert job.state.exit_code is None
    job.tick(1, alive)
    assert job.state.exit_code == 1
    for peer in alive:
        failed = job.last(peer, "failed")
        assert (failed["role"], failed["rank"]) == (role, rank)
        assert "not heard for 5 s" in failed["reason"]
    assert f"{role} {rank}" in job.state.failure


def test_a_scheduler_that_was_stopped_itself_blames_nobody():
    job = Job(heartbeat_timeout_s=5).begin()
    job.tick(1, ["w0", "w1", "s0", "s1"])
    job.now += 60
    job.deliver(job.state.tick(job.now))
    assert job.state.exit_code is None
    job.tick(6, ["w0", "w1", "s0"])
    assert "server 1" in job.state.failure


def test_fail_reaches_everybody_else():
    job = Job().begin()
    assert sorted(job.send("w1", "fail", reason="ValueError: x")) == [
        ("s0", "failed"),
        ("s1", "failed"),
        ("w0", "failed"),
        ("w1", "bye"),
    ]
    assert job.state.exit_code == 1
    failed = job.last("s0", "failed")
    assert failed == {
        "kind": "failed",
        "role": "worker",
        "rank": 1,
        "host": "10.0.0.1",
        "reason": "ValueError: x",
    }
    assert job.send("w0", "fail", reason="me too") == []
    assert job.state.failure == "worker 1 (host 10.0.0.1): ValueError: x"


def test_stopped_from_outside():
    job = Job().begin()
    assert len(job.deliver(job.state.stop("the scheduler was stopped"))) == 4
    assert job.state.exit_code == 1
    assert job.last("s1", "failed")["reason"] == "the scheduler was stopped"
    assert job.state.stop("again") == []


# ---- hostile input


def test_strangers_and_nonsense_are_dropped_counted_and_logged_rarely(caplog):
    job = Job().begin()
    nonsense = [
        ("stranger", {"kind": "barrier", "req": 1}),
        ("w0", {}),
        ("w0", {"kind": 3}),
        ("w0", {"kind": "dance"}),
        ("w0", {"kind": "__class__"}),
        ("w0", {"kind": "barrier", "req": "1"}),
        ("w0", {"kind": "barrier", "req": True}),
        ("w0", {"kind": "barrier", "req": -1}),
        ("w0", {"kind": "ask", "req": 1, "name": "x", "body": []}),
        ("w0", {"kind": "declare", "req": 1, "space": 0, "key": 1.5, "shape": [1]}),
        ("w0", {"kind": "order", "space": 0, "keys": [[1]]}),
        ("w0", {"kind": "reply", "req": 0, "body": {}}),
        ("w0", {"kind": "ready"}),
        ("s0", {"kind": "ready"}),
        ("s0", {"kind": "ask", "req": 0, "name": "x", "body": {}}),
        ("s0", {"kind": "barrier", "req": 0}),
        ("w0", job.registration("worker")),
        ("x", {"kind": "register"}),
        ("x", {"kind": "register", "role": "boss"}),
        ("w1", {"kind": "fail", "reason": 3}),
    ]
    for peer, body in nonsense:
        assert job.state.handle(peer.encode(), body, b"", job.now) == []
    assert job.state.dropped == len(nonsense)
    assert job.state.exit_code is None
    assert len(caplog.records) == 1
    job.now += 6
    job.send("w0", "dance")
    assert len(caplog.records) == 2
    assert f"{len(nonsense) + 1} so far" in caplog.records[-1].getMessage()


def test_requests_before_the_welcome_are_dropped():
    job = Job()
    job.register("w0")
    assert job.send("w0", "barrier", req=0) == []
    assert job.state.dropped == 1


def test_anything_at_all_never_raises_nor_ends_the_job():
    """Messages with random fields of random types, from members and strangers, all phases."""
    rng = random.Random(5)
    scraps = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**70,
        10**4200,
        1.5,
        float("inf"),
        "",
        "a",
        "worker",
        "server",
    ]
    scraps += [
        "float32",
        "\ud800",
        [],
        [1],
        [-1],
        [[]],
        {},
        {"data": 1},
        {"data": "", "credit": ""},
    ]
    kinds = "register ready declare ask reply barrier order status heartbeat dance".split()
    names = (
        "role worker_id host pid addresses agreed version req space key shape dtype mode".split()
    )
    names += "whole name body error keys".split()
    good = {"host": "h", "pid": 1, "space": 0, "key": "k", "shape": [1], "req": 0, "body": {}}
    good.update(dtype="float32", mode="sync", whole=False, name="n", keys=[], version="7")
    for job in (Job(), Job().begin(), Job(workers=1, servers=1).begin()):
        good["agreed"] = job.settings.agreed()
        for _ in range(4000):
            body = {"kind": rng.choice(kinds), **good}
            for name in rng.sample(names, rng.choice([0, 1, 2, 5])):
                body[name] = rng.choice(scraps)
            peer = rng.choice(["w0", "w1", "s0", "s1", "x", ""])
            job.deliver(job.state.handle(peer.encode(), body, b"", job.now))
        assert job.state.exit_code is None
        assert job.state.dropped > 1000
        repr(job.state)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"{}"],
        [b"{}", b"", b""],
        [b"", b""],
        [b"[1]", b""],
        [b"null", b""],
        [b"\xff\xfe", b""],
        [b"[" * 100_000, b""],
        [b'{"a":' * 100_000, b""],
    ],
)
def test_frames_that_are_no_message(frames):
    with pytest.raises(Malformed):
        decode(frames)


def test_frames_of_a_message():
    assert decode(encode({"kind": "x", "n": 1}, b"blob")) == ({"kind": "x", "n": 1}, b"blob")
    assert decode([memoryview(b"{}"), memoryview(b"b")]) == ({}, b"b")
    with pytest.raises(TypeError):
        encode({"kind": object()})


def test_blobs():
    blobs = [b"", b"abc", b"", b"d"]
    assert split_blobs(*join_blobs(blobs)) == blobs
    for sizes in ([1], [3, 1, 1], [-1, 5], []):
        with pytest.raises(Malformed):
            split_blobs(sizes, b"abcd")


def test_liveness_watches_only_those_it_was_told_of():
    liveness = Liveness(10)
    liveness.heard(b"a", 0)
    liveness.heard(b"b", 0)
    liveness.forget(b"b")
    liveness.forget(b"never seen")
    assert [liveness.silent(now) for now in (0, 4, 8)] == [[], [], []]
    assert liveness.silent(11) == [b"a"]
