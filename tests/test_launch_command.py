"""`p3 launch`: the command line, and whole jobs of scripts that train."""

from __future__ import annotations

import signal
import sys

import pytest
from commands import run, started


def launch_command(*args):
    return [sys.executable, "-m", "p3", "launch", *map(str, args)]


# the command


def show(tmp_path, text="import sys, os; print(sys.argv, os.environ['OUT'])"):
    (tmp_path / "show.py").write_text(text)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["show.py"], "-n/--workers"),
        (["-n", "0", "show.py"], "'0' is not a number of processes"),
        (["-n", "2"], "a SCRIPT"),
        (["-n", "2", "-s"], "expected one argument"),
        (["-n", "2", "none.py"], "there is no script 'none.py'"),
        (["-n", "2", "--wrong", "show.py"], "--wrong"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, args, complaint):
    show(tmp_path)
    done = run(launch_command(*args), cwd=tmp_path)
    assert done.returncode == 2 and complaint in done.stderr and not done.stdout


ENV = """
import os, sys
names = "WORKER_ID NUM_WORKER NUM_SERVER PS_ROOT_URI NODE_HOST INTERFACE ROLE".split()
print("ENV", *(os.environ.get("DMLC_" + name) for name in names), sys.argv[1:])
print("SECRET", os.environ["P3_SECRET"], os.environ["DMLC_PS_ROOT_PORT"])
sys.exit(9)
"""


def test_workers_run_the_script_with_the_contracts_variables(tmp_path):
    show(tmp_path, ENV)
    args = ["-n", 2, "-s", "1", "show.py", "-n", "5", "--", "-m"]
    done = run(launch_command(*args), cwd=tmp_path, DMLC_INTERFACE="none0", DMLC_WORKER_ID="7")
    lines = sorted(done.stdout.splitlines())
    assert done.returncode == 9
    for rank, line in enumerate(line for line in lines if "ENV" in line):
        tail = f"ENV {rank} 2 1 127.0.0.1 127.0.0.1 None None ['-n', '5', '--', '-m']"
        assert line == f"worker {rank}  | {tail}"
    secrets = {line.split("SECRET ")[1] for line in lines if "SECRET" in line}
    assert len(secrets) == 1 and len(secrets.pop().split()[0]) == 64


def test_a_secret_of_the_users_own_is_kept(tmp_path):
    show(tmp_path, ENV)
    done = run(launch_command("-n", 1, "-m", "show"), cwd=tmp_path, P3_SECRET="abc")
    assert done.returncode == 9 and "SECRET abc " in done.stdout


# whole jobs

STORE = """
import sys
import mxnet as mx
kv = mx.kv.create(sys.argv[1])
value = mx.nd.full((40,), kv.rank + 1)
kv.init(3, mx.nd.zeros((40,)))
kv.push(3, value)
kv.pull(3, out=value)
print("GOT", kv.type, kv.num_workers, set(value.asnumpy()))
"""


@pytest.mark.parametrize("args", [["dist_sync_p3"], ["--native", "dist_sync"]])
def test_a_job_of_either_kind(tmp_path, args):
    *options, name = args
    show(tmp_path, STORE)
    done = run(launch_command("-n", 2, "-s", 2, *options, "show.py", name), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"worker {rank}  | GOT {name} 2 {{3.0}}\n" in done.stdout
    assert "p3 " not in done.stderr  # the launcher has nothing to tell


def test_a_job_whose_script_never_creates_a_store_fails_loudly(tmp_path):
    show(tmp_path, "print('trained')")
    done = run(launch_command("-n", 2, "show.py"), cwd=tmp_path)
    assert done.returncode == 1
    for rank in range(2):
        assert f"worker {rank}  | trained\n" in done.stdout
    assert "p3 run: ERROR: this job has 2 workers" in done.stderr
    assert "never created a p3 store" in done.stderr


def test_one_worker_may_train_without_a_store(tmp_path):
    show(tmp_path, "print('trained')")
    assert run(launch_command("-n", 1, "show.py"), cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["show.py", "dist_sycn_p3"], "did you mean 'dist_sync_p3'?"),
        (["show.py", "dist_sync"], "p3 launch --native"),
        (["--native", "show.py", "dist_sync_p3"], "(--native)"),
    ],
)
def test_a_store_that_cannot_work_fails_the_job(tmp_path, args, complaint):
    show(tmp_path, STORE)
    done = run(launch_command("-n", 2, "-s", 1, *args), cwd=tmp_path)
    assert done.returncode == 1 and complaint in done.stderr


def test_interrupting_a_job_leaves_no_process_and_no_port(tmp_path, life):
    text = f"""
{life.hold}
import signal, sys
sys.argv = ["", "dist_sync_p3"]
{STORE}
print("PORT", os.environ["DMLC_PS_ROOT_PORT"], flush=True)
print("ready", flush=True)
while True:
    signal.pause()
"""
    show(tmp_path, text)
    with started(launch_command("-n", 2, "show.py"), ready=2, cwd=tmp_path) as job:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=5)
        assert job.returncode == 130 and life.over(0)
