"""Clients and the scheduler together, over both transports: keys, commands and barriers."""

import concurrent.futures
import os
import queue

import pytest
from control_job import DEADLINE_S

from p3.control import KeyFailed
from p3.errors import PeerError, UsageError

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
