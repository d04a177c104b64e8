"""Ranks that do not do the same: other shapes, a key fewer, a batch fewer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from p3.errors import PeerError

ROOT = Path(__file__).resolve().parents[2]
STORE = "dist_sync_p3"
LIMIT_S = 120


def shapes_that_differ(shapes):
    kv = mx.kv.create(STORE)
    value = mx.nd.zeros(shapes[kv.rank])
    kv.init("w", value)
    out = mx.nd.zeros(shapes[kv.rank])
    with pytest.raises((PeerError, mx.base.MXNetError)) as caught:
        kv.pull("w", out=out)
        out.wait_to_read()
        kv.pushpull("w", value, out=out)  # whoever was first may have pulled already
        out.wait_to_read()
    return str(caught.value)


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 2)], [(20,), (21,)], [(4,), (4, 1)]])
def test_shapes_that_differ_are_an_error_on_both_ranks(pair, shapes):
    for told in pair.run(shapes_that_differ, shapes):
        for word in ("'w'", "rank 0", "rank 1", str(shapes[0]), str(shapes[1])):
            assert word in told


FEWER = """
import sys, mxnet as mx
kv = mx.kv.create("dist_sync_p3")
keys = ["a", "b"] if kv.rank == 0 or sys.argv[1] != "key" else ["a"]
weights = {key: mx.nd.zeros((20,)) for key in keys}
for key, weight in weights.items():
    kv.broadcast(key, weight, out=weight)
batches = {"key": 1, "alive": 5, "batch": 5 - kv.rank}[sys.argv[1]]
for batch in range(batches):
    for key, weight in weights.items():
        kv.pushpull(key, mx.nd.ones((20,)), out=weight)
    mx.nd.waitall()
if sys.argv[1] == "alive" and kv.rank == 1:
    kv.barrier()
if sys.argv[1] == "alive":
    kv.pushpull("a", mx.nd.ones((20,)), out=weights["a"])
    mx.nd.waitall()
print("DONE", kv.rank)
"""


def job(folder, what, **env):
    script = folder / "fewer.py"
    script.write_text(FEWER)
    return subprocess.run(
        [sys.executable, "-m", "p3", "launch", "-n", "2", "-s", "2", str(script), what],
        env={**os.environ, "PYTHONPATH": str(ROOT), "P3_SLICE_ELEMS": "8", **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "words"), [("batch", ["rank 1", "round 5", "ended"]), ("key", ["'b'", "rank 1"])]
)
def test_waiting_for_a_rank_that_has_ended_is_an_error_at_once(what, words, tmp_path):
    done = job(tmp_path, what)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "DONE 1" in output and "DONE 0" not in output
    for word in words:
        assert word in output


def test_waiting_for_a_rank_that_is_there_is_reported_and_then_an_error_if_that_is_set(tmp_path):
    done = job(tmp_path, "alive", P3_STALL_REPORT_S="1", P3_ROUND_TIMEOUT_S="3")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "still waiting: key 'a'" in output
    assert "P3_ROUND_TIMEOUT_S" in output and "rank 1" in output
