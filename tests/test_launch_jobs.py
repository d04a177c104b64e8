"""`p3 launch`: many processes as one; whatever happens, none is left."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from commands import TIMEOUT_S, run, started

SILENT = "import signal, sys; print('ready', flush=True)"  # and then what follows

#: runs a job of small scripts, {name: code}, with short endings
DRIVER = """
import json, os, signal, sys
from p3.launch import job
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
after_s = float(os.environ.get("ENDING_S", 0.5))
job.FAILED = job.FINISHED = ((after_s, TERM), (2 * after_s, KILL))
job.INTERRUPTED = ((0.0, INT), (after_s, TERM), (2 * after_s, KILL))
job.TERMINATED = ((0.0, TERM), (2 * after_s, KILL))
env = dict(os.environ, PYTHONUNBUFFERED="1")
specs = [
    job.Spec(name, [sys.executable, "-c", code], env, name.startswith("worker"))
    for name, code in json.loads(sys.argv[1]).items()
]
sys.exit(job.Job(specs, colour=False).run())
"""
REPORT = "import os; os.write(int(os.environ['P3_REPORT_FD']), b'%d\\n' % os.getpid());"


REPORT_WHEN_TOLD = f"""
import os, signal, sys
def report(*_):
    {REPORT}
    sys.exit(1)
signal.signal(signal.SIGTERM, report)
signal.pause()
"""


def job_command(processes):
    return [sys.executable, "-c", DRIVER, json.dumps(processes)]


def test_output_of_all_processes_is_passed_on():
    done = run(
        job_command(
            {
                "server 0": "import sys; print('serving', file=sys.stderr)",
                "worker 0": "import sys; sys.stdout.write('no end'); print(sys.stdin.read())",
                "worker 1": "print('x' * 300000)",
            }
        )
    )
    assert done.returncode == 0
    assert "server 0 | serving\n" in done.stderr
    assert "worker 0 | no end\n" in done.stdout
    assert done.stdout.count("x") == 300000


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import sys; sys.exit(3)", 3, "worker 1 exited with code 3"),
        ("1 / 0", 1, "worker 1 exited with code 1"),
        ("import os; os.kill(os.getpid(), 9)", 137, "worker 1 was killed by SIGKILL"),
        ("import os; os.abort()", 134, "worker 1 was killed by SIGABRT"),
    ],
)
def test_a_failure_ends_the_job_with_its_code(code, exit_code, words):
    wait = "import signal; signal.pause()"
    done = run(job_command({"scheduler": wait, "worker 0": wait, "worker 1": code}))
    assert done.returncode == exit_code
    assert (
        words in done.stderr
        and "still running: scheduler, worker 0; sending SIGTERM" in done.stderr
    )


def test_traceback_comes_before_the_verdict():
    done = run(job_command({"worker 0": "raise KeyError('x' * 10000)"}))
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("worker 0 | KeyError") and "exited with code 1" in last[1]


def test_the_failure_that_was_reported_first_decides_though_it_ends_last(tmp_path):
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    cause = f"""
{REPORT}
import select, sys
fd = os.open({gate!r}, os.O_WRONLY)
os.write(fd, b"x")
poll = select.poll()
poll.register(fd, 0)
poll.poll()  # until the reader has ended
sys.exit(5)
"""
    effect = f"import os, sys; os.read(os.open({gate!r}, os.O_RDONLY), 1); sys.exit(4)"
    done = run(job_command({"worker 0": effect, "worker 1": cause}), ENDING_S="60")
    words = [line.split("| ")[1] for line in done.stderr.splitlines()]
    assert words == [
        "worker 0 exited with code 4",
        "worker 1 exited with code 5",
        "the job failed; the first was: worker 1 exited with code 5",
    ]
    assert done.returncode == 5


def test_a_failure_that_comes_of_our_sigterm_does_not_count():
    done = run(job_command({"scheduler": REPORT_WHEN_TOLD, "worker 0": ""}))
    assert done.returncode == 0, done.stderr


def test_a_reported_failure_counts_even_if_the_launcher_had_to_end_it():
    code = f"{REPORT} import signal; signal.pause()"
    assert run(job_command({"worker 0": code})).returncode == 143


def test_a_process_that_ignores_sigterm_is_killed():
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    done = run(job_command({"worker 0": stubborn, "worker 1": "raise SystemExit(9)"}))
    assert done.returncode == 9 and "sending SIGKILL" in done.stderr


def test_servers_left_behind_by_good_workers_are_ended_and_named():
    done = run(job_command({"server 0": "import signal; signal.pause()", "worker 0": ""}))
    assert done.returncode == 0
    assert "still running: server 0; sending SIGTERM" in done.stderr


def test_a_server_that_fails_in_the_end_fails_the_job():
    code = "import sys; sys.stdin.read(); sys.exit(6)"
    assert run(job_command({"server 0": code, "worker 0": ""})).returncode == 6


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_are_passed_on_and_nothing_is_left(life, signum, code):
    quiet = f"{life.hold}{SILENT}; signal.pause()"
    deaf = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN);"
    processes = {"server 0": quiet, "worker 0": quiet, "worker 1": deaf + quiet}
    with started(job_command(processes), ready=3) as job:
        job.send_signal(signum)
        job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == code
        assert life.over(0)


def test_a_second_interrupt_kills_at_once(life):
    code = f"{life.hold}import signal; signal.signal(2, lambda *_: print('ready', flush=True));"
    code += f"signal.signal(15, signal.SIG_IGN); {SILENT}\nwhile True: signal.pause()"
    with started(job_command({"worker 0": code}), ready=1, ENDING_S="60") as job:
        job.send_signal(signal.SIGINT)
        assert b"ready" in job.stdout.readline()
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == 130 and life.over(0)


def test_what_a_process_started_ends_with_it(life):
    code = (
        f"{life.hold}import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], close_fds=False)"
    )
    done = run(job_command({"worker 0": code}))
    assert done.returncode == 0 and life.over(0)


def test_when_the_launcher_is_killed_so_are_all(life):
    child = "import signal; print('ready', flush=True); signal.pause()"
    code = (
        f"{life.hold}import signal, subprocess, sys;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], close_fds=False);"
        "signal.signal(15, signal.SIG_IGN); signal.pause()"
    )
    with started(job_command({"worker 0": code, "worker 1": code}), ready=2) as job:
        job.send_signal(signal.SIGKILL)
        assert life.over(TIMEOUT_S)


def test_a_stopped_process_is_ended_too(life):
    stopped = f"{life.hold}import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    done = run(job_command({"worker 0": stopped, "worker 1": "raise SystemExit(2)"}))
    assert done.returncode == 2 and life.over(0)


def test_output_that_nobody_reads_any_more_ends_the_job(life):
    code = f"{life.hold}{SILENT}\nwhile True: print('x' * 1000)"
    with started(job_command({"worker 0": code}), ready=1) as job:
        job.stdout.close()
        assert job.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
        assert life.over(0)
