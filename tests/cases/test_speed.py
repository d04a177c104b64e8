"""Speed: calls that never wait, and urgent values that overtake on a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from .gate import behind_gate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.netlab import NetLab, obstacle  # noqa: E402

STORE = "dist_sync_p3"
LINK_BPS = 200e6
LIMIT_S = 120


# ---- calls


def gradients_ready_in_reverse():
    """Ten gradients, none ready when ``pushpull`` is called; each arrives before the next is."""
    kv = mx.kv.create(STORE)
    gates, outs = [], []
    for key in range(10):
        gate, gradient = behind_gate(mx.nd.full((20,), key + kv.rank))
        kv.init(key, mx.nd.zeros((20,)))
        gates.append(gate)
        outs.append(mx.nd.empty((20,)))
        kv.pushpull(key, gradient, out=outs[key], priority=-key)
    arrived = []
    for key in reversed(range(10)):
        gates[key].set()
        arrived.append(outs[key][0].asscalar())
    return arrived


def test_calls_return_at_once_and_what_is_ready_first_leaves_first(pair):
    assert pair.run(gradients_ready_in_reverse) == [[2 * key + 1 for key in range(9, -1, -1)]] * 2


# ---- a slow link

WORKER = Path(__file__).with_name("slow_link.py")


def environment(role, lab):
    return {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": lab.hosts[0].address,
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "P3_SECRET": "of this test",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=f"no slow links here: {obstacle()}")
def test_urgent_values_overtake_a_large_one_both_ways_and_it_still_arrives():
    command = [sys.executable, "-m", "p3", "run", str(WORKER)]
    with NetLab(hosts=2, rate_bps=LINK_BPS) as lab:
        for role in ("scheduler", "server"):
            lab.hosts[0].run(command, environment(role, lab))
        worker = lab.hosts[1].run(command, environment("worker", lab), stdout=subprocess.PIPE)
        output, _ = worker.communicate(timeout=LIMIT_S)
    assert worker.returncode == 0
    for direction, seen in json.loads(output).items():
        least_s = seen["bytes"] * 8 / LINK_BPS
        assert seen["seconds"] > 0.9 * least_s, f"{direction}: the link was not slow"
        waits = sorted(seen["urgent_seconds"])
        assert len(waits) >= 10, direction
        # a queue without priorities would take as long as what is left of the large value
        assert waits[len(waits) // 2] < 0.05 * least_s, direction
        assert waits[-1] < 0.5 * least_s, direction
