"""The scheduler's state machine, bare: what members of a running job ask of it."""

import pytest
from scheduler_job import Job

from p3.scheduler.messages import split_blobs

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
    told = [("s0", "left"), ("s1", "left")]
    assert job.send("w1", "goodbye") == [("w1", "bye"), ("w0", "reply"), *told]
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
