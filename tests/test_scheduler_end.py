"""The scheduler's state machine, bare: how a job ends, and how it notices that it has to."""

import pytest
from scheduler_job import Job

from p3.scheduler.liveness import Liveness


def test_goodbyes_stop_the_servers_and_end_the_job():
    job = Job().begin()
    assert job.send("w0", "goodbye") == [("w0", "bye"), ("s0", "left"), ("s1", "left")]
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


def test_liveness_watches_only_those_it_was_told_of():
    liveness = Liveness(10)
    liveness.heard(b"a", 0)
    liveness.heard(b"b", 0)
    liveness.forget(b"b")
    liveness.forget(b"never seen")
    assert [liveness.silent(now) for now in (0, 4, 8)] == [[], [], []]
    assert liveness.silent(11) == [b"a"]
