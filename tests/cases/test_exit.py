"""Exits: a script just ends, without a word to its store, whatever the others still do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

LIMIT_S = 200  # for a whole job, MXNet's imports and all
KEYS = 20
ENDS_FIRST = f"""
    import time
    import mxnet as mx
    kv = mx.kv.create("dist_sync_p3")
    for key in range({KEYS}):
        kv.init(key, mx.nd.zeros((100,)))
    if kv.rank == 1:
        time.sleep(3)  # its work, while rank 0 has pushed and ended
    for key in range({KEYS}):
        kv.push(key, mx.nd.full((100,), (kv.rank + 1) * (key + 1)))
    if kv.rank == 1:
        outs = [mx.nd.zeros((100,)) for key in range({KEYS})]
        kv.pull(list(range({KEYS})), out=outs)
        right = all((out == 3 * (key + 1)).min().asscalar() for key, out in enumerate(outs))
        print("all values arrived:", bool(right), flush=True)
"""
NEVER_USES = """
    import mxnet as mx
    kv = mx.kv.create("dist_sync_p3")
    print("created", kv.rank, flush=True)
"""


def launch(tmp_path, text, *options):
    """Run the script in a job; return its exit code and output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "p3", "launch", *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        watchdog = threading.Timer(LIMIT_S, job.terminate)
        watchdog.start()
        output = job.stdout.read().decode()
        watchdog.cancel()
    return job.returncode, output


def test_who_ends_right_after_its_last_push_has_delivered_it(tmp_path):
    code, output = launch(tmp_path, ENDS_FIRST, "-n", "2", "-s", "2")
    assert "all values arrived: True" in output
    assert code == 0, output
    assert "still running" not in output  # 5 s after the last worker


def test_who_creates_a_store_and_never_uses_it_ends_as_well(tmp_path):
    code, output = launch(tmp_path, NEVER_USES, "-n", "2", "-s", "1")
    assert output.count("created") == 2
    assert code == 0, output
    assert "still running" not in output
