"""`p3 launch`: many processes as one; whatever happens, none is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p3.launch.output import STDERR, STDOUT, Line, Lines, Printer

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120
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


def environment(**more):
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    return {**env, "PYTHONPATH": str(ROOT), **more}


def job_command(processes):
    return [sys.executable, "-c", DRIVER, json.dumps(processes)]


def launch_command(*args):
    return [sys.executable, "-m", "p3", "launch", *map(str, args)]


def run(command, cwd=None, **env):
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextlib.contextmanager
def started(command, ready, cwd=None, **env):
    """The command, started, once ``ready`` of its processes have said so; killed in the end."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        for _ in range(ready):
            line = process.stdout.readline()
            while b"ready" not in line:
                assert line, process.stderr.read()
                line = process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def life(tmp_path):
    """A FIFO that is held open by whoever opened it: ``life.over()`` waits until nobody does."""

    class Life:
        path = tmp_path / "life"
        hold = f"import os; life = os.open({str(path)!r}, os.O_WRONLY);"
        hold += "os.set_inheritable(life, True);"

        def over(self, within_s):
            return bool(select.select([fd], [], [], within_s)[0]) and os.read(fd, 1) == b""

    os.mkfifo(Life.path)
    fd = os.open(Life.path, os.O_RDONLY | os.O_NONBLOCK)
    yield Life()
    os.close(fd)


# output


def test_lines_are_cut_whole_whatever_the_pieces():
    data = b"one\ntwo\r\n\n10%\r20%\r\xff\x00\r\n   \rlast"
    expected = [
        Line(b"one"),
        Line(b"two"),
        Line(b""),
        Line(b"10%", redrawn=True),
        Line(b"20%", redrawn=True),
        Line(b"\xff\x00"),
        Line(b"last"),
    ]
    for size in range(1, len(data) + 1):
        lines = Lines()
        got = [
            line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])
        ]
        assert got + lines.flush() == expected and lines.flush() == []


def test_a_line_without_end_does_not_grow_for_ever():
    lines = Lines()
    got = [line for _ in range(64) for line in lines.feed(b"x" * 4096)] + lines.flush()
    assert b"".join(line.text for line in got) == b"x" * 64 * 4096
    assert max(len(line.text) for line in got) < 100_000


class Log:
    """A Printer that writes into a pipe (or, ``tty``, a terminal)."""

    def __init__(self, tty=False, colour=False):
        self.now = 0.0
        self.end, fd = os.openpty() if tty else os.pipe()
        names = ("p3", "worker 0", "worker 1")
        self.printer = Printer(names, colour, lambda: self.now, (fd, fd))
        self.fd = fd

    def text(self):
        os.close(self.fd)
        text = b""
        with contextlib.suppress(OSError):  # the end, for a terminal
            while not text.endswith(b"END"):
                data = os.read(self.end, 65536)
                if not data:
                    break
                text += data
        os.close(self.end)
        return text.replace(b"\r\n", b"\n")


def test_each_line_has_its_role_before_it():
    log = Log()
    log.printer.write("worker 0", STDOUT, Line(b"a\xff"))
    log.printer.write("p3", STDERR, Line(b""))
    assert log.text() == b"worker 0 | a\xff\np3       | \n"


def test_in_a_file_a_bar_is_shown_now_and_then_and_when_it_is_done():
    log = Log()
    for log.now in range(25):
        log.printer.write("worker 0", STDOUT, Line(b"%d" % log.now, redrawn=True))
    log.printer.write("worker 1", STDOUT, Line(b"other", redrawn=True))
    log.printer.write("worker 0", STDOUT, Line(b"done"))
    log.printer.close()
    lines = log.text().splitlines()
    assert [line.split(b"| ")[1] for line in lines] == [b"0", b"10", b"20", b"other", b"done"]


def test_on_a_terminal_a_bar_is_redrawn_and_makes_way():
    log = Log(tty=True)
    for percent in (1, 2):
        log.printer.write("worker 0", STDERR, Line(b"%d%%" % percent, redrawn=True))
    log.printer.write("worker 1", STDOUT, Line(b"text"))
    log.printer.write("worker 1", STDOUT, Line(b"more"))
    log.printer.write("worker 0", STDERR, Line(b"3%" + b"#" * 500, redrawn=True))
    log.printer.close()
    text = log.text()
    clear = b"\r\x1b[K"
    assert text.startswith(
        clear + b"worker 0 | 1%" + clear + b"worker 0 | 2%" + clear + b"worker 1 | text\n"
        b"worker 1 | more\n" + clear + b"worker 0 | 3%#"
    )
    assert text.endswith(b"#\n") and text.count(b"#") < 500  # one line of the terminal


def test_colours_are_for_terminals():
    for tty, colour in ((True, True), (True, False), (False, True)):
        log = Log(tty, colour)
        log.printer.write("worker 0", STDOUT, Line(b"x"))
        assert (b"\x1b[" in log.text()) == (tty and colour)


def test_a_reader_that_went_away_is_noticed():
    end, fd = os.pipe()
    os.close(end)
    printer = Printer(["worker 0"], descriptors=(fd, fd))
    printer.write("worker 0", STDOUT, Line(b"x"))
    assert printer.broken
    os.close(fd)


# jobs


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
