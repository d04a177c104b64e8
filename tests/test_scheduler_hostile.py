"""The scheduler's state machine, bare: what is no message, and messages that make no sense."""

import random

import pytest
from scheduler_job import Job

from p3.scheduler.messages import Malformed, decode, encode, join_blobs, split_blobs


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
