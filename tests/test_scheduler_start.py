"""The scheduler's state machine, bare: registrations, ranks and welcomes."""

import pytest
from scheduler_job import Job


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
