"""p3 under MXNet's own names, for scripts that know no others."""

from __future__ import annotations

import sys

import pytest
from commands import run

#: as scripts have it that were written for MXNet alone
SCRIPT = """
import argparse
import mxnet as mx

parser = argparse.ArgumentParser()
parser.add_argument("--kvstore", choices=["local", "dist_sync", "dist_device_sync", "dist_async"])
kv = mx.kv.create(parser.parse_args().kvstore)
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init(3, mx.nd.zeros((2,)))
kv.push(3, mx.nd.ones((2,)) * (kv.rank + 1))
out = mx.nd.zeros((2,))
kv.pull(3, out=out)
print("GOT", type(kv).__name__, kv.type, kv.num_workers, out.asnumpy().tolist())
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "old.py").write_text(SCRIPT)
    return tmp_path


def p3(*args):
    return [sys.executable, "-m", "p3", *map(str, args)]


def test_launched_with_replace(script):
    command = p3("launch", "-n", 2, "-s", 1, "--replace", "old.py", "--kvstore", "dist_sync")
    done = run(command, cwd=script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("GOT P3KVStore dist_sync 2 [-3.0, -3.0]") == 2


@pytest.mark.parametrize("name", ["dist_device_sync", "dist_async"])
def test_run_with_the_setting(script, name):
    done = run(p3("run", "old.py", "--kvstore", name), cwd=script, P3_REPLACE_NATIVE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"GOT P3KVStore {name} 1 [-1.0, -1.0]" in done.stdout


def test_not_asked_for_it_is_refused_with_both_ways_out(script):
    done = run(p3("launch", "-n", 1, "-s", 1, "old.py", "--kvstore", "dist_sync"), cwd=script)
    assert done.returncode != 0
    assert "--replace" in done.stdout + done.stderr
    assert "--native" in done.stdout + done.stderr


def test_native_and_replace_exclude_each_other(script):
    done = run(p3("launch", "-n", 1, "--native", "--replace", "old.py"), cwd=script)
    assert done.returncode == 2
    assert "not allowed with" in done.stderr
