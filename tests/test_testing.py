"""LocalCluster itself: results, tracebacks, and nobody left waiting."""

from __future__ import annotations

import os
import threading

import pytest

from p3.errors import PeerError, UsageError
from p3.testing import LocalCluster


def rank():
    import mxnet as mx

    return mx.kv.create("dist_sync_p3").rank


def add(first, second):
    return first + second + rank()


def fail(ranks):
    if rank() in ranks:
        raise KeyError("a reason")
    return "fine"


def fail_or_hang():
    if rank() == 0:
        raise KeyError("a reason")
    hang_for_ever()


def hang_for_ever():
    threading.Event().wait()


def end(code):
    print("last words", flush=True)
    os._exit(code)


def test_functions_run_in_all_workers_until_one_hangs():
    with LocalCluster(2, 1) as cluster:
        assert cluster.alive
        assert cluster.run(add, 10, 20) == [30, 31]
        with pytest.raises(UsageError, match="top of a module"):
            cluster.run(lambda: 1)
        with pytest.raises(
            PeerError, match=r"(?s)rank 1: Traceback.*KeyError: 'a reason'"
        ) as caught:
            cluster.run(fail, [1])
        assert caught.value.rank == 1
        assert cluster.run(fail, []) == ["fine", "fine"]
        with pytest.raises(PeerError, match="no answer from worker 1") as caught:
            cluster.run(fail_or_hang)
        assert "KeyError: 'a reason'" in str(caught.value)
        assert "in hang_for_ever" in str(caught.value)
        assert not cluster.alive
    assert None not in cluster.exit_codes.values()


def test_a_process_that_ends_is_noticed_at_once():
    with LocalCluster(1, 1) as cluster:
        with pytest.raises(PeerError, match=r"(?s)worker 0 has ended.*exit code 3:\nlast words"):
            cluster.run(end, 3)
        assert not cluster.alive
    assert cluster.exit_codes["worker 0"] == 3


def test_a_job_that_cannot_start_says_why():
    with pytest.raises(PeerError, match="P3_SLICE_ELEMS"):
        LocalCluster(1, 1, {"P3_SLICE_ELEMS": "none"}).__enter__()
