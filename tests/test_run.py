"""`p3 run`: a script is run as Python runs it, and a role is taken as the environment gives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from commands import ROOT, TIMEOUT_S, environment, run, started

from p3.launch import script as scripts
from p3.launch.script import Script

P3_RUN = [sys.executable, "-m", "p3", "run"]
JOB = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# as Python does

SHOW = """
import sys, os
spec = __spec__ and __spec__.name
assert sys.modules["__main__"].__dict__ is globals()
print(sys.argv, __name__, os.path.abspath(__file__), sys.path[0], spec, __package__)
print(os.getcwd(), __doc__, sorted(globals()))
"""


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    path = write(tmp_path / "scripts" / "show.py", SHOW)
    for target in ("scripts/show.py", str(path)):
        args = [target, "-n", "3", "--", "-m", "--native", "--help", ""]
        bare = run([sys.executable, *args], tmp_path)
        ours = run([*P3_RUN, *args], tmp_path)
        assert ours.stdout == bare.stdout and ours.returncode == 0
        assert run([*P3_RUN, "--", *args], tmp_path).stdout == bare.stdout


def test_a_module_sees_what_it_sees_under_python(tmp_path):
    write(tmp_path / "pack" / "__init__.py", "")
    write(tmp_path / "pack" / "__main__.py", SHOW)
    write(tmp_path / "pack" / "show.py", SHOW + "from . import __name__ as parent; print(parent)")
    for target in ("pack", "pack.show"):
        args = ["-m", target, "-m", "--x", "--", "-n"]
        bare = run([sys.executable, *args], tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
        ours = run([*P3_RUN, *args], tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
        assert ours.stdout == bare.stdout and ours.returncode == 0, ours.stderr
    assert run([*P3_RUN, "-mpack.show"], tmp_path).returncode == 0


def test_a_directory_is_run_by_its_main(tmp_path):
    write(tmp_path / "app" / "__main__.py", "import sys, other; print(sys.argv, other.x)")
    write(tmp_path / "app" / "other.py", "x = 5")
    assert run([*P3_RUN, "app", "-a"], tmp_path).stdout == "['app', '-a'] 5\n"


def test_a_script_imports_its_neighbours_and_not_ours(tmp_path):
    write(tmp_path / "a" / "config.py", "x = 1")
    path = write(tmp_path / "a" / "s.py", "import config; print(config.x)")
    assert run([*P3_RUN, path], tmp_path).stdout == "1\n"


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('bad luck')", 1, "bad luck\n"),
        ("import atexit; atexit.register(print, 'end'); raise SystemExit(5)", 5, ""),
    ],
)
def test_exit_codes(tmp_path, text, code, stderr):
    done = run([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path)
    assert (done.returncode, done.stderr) == (code, stderr)
    assert done.stdout == ("end\n" if "atexit" in text else "")


def test_an_exception_is_shown_as_python_shows_it(tmp_path):
    for text in ("def f():\n    raise KeyError('x')\nf()", "x = = 1", "import nothing_there"):
        path = write(tmp_path / "s.py", text)
        bare, ours = run([sys.executable, path], tmp_path), run([*P3_RUN, path], tmp_path)
        assert ours.returncode == 1 and ours.stderr == bare.stderr
    write(tmp_path / "s.py", "import sys; sys.excepthook = lambda *a: print(a[1]); 1 / 0")
    assert run([*P3_RUN, "s.py"], tmp_path).stdout == "division by zero\n"


def test_what_cannot_be_run_is_named(tmp_path):
    done = run([*P3_RUN, "none.py"], tmp_path)
    assert done.returncode == 2 and "none.py': No such file" in done.stderr
    done = run([*P3_RUN, "-m", "none.at_all"], tmp_path)
    assert done.returncode == 1 and "no module named 'none.at_all'" in done.stderr
    write(tmp_path / "pack" / "__init__.py", "import missing_thing")
    done = run([*P3_RUN, "-m", "pack"], tmp_path)
    assert done.returncode == 1 and "No module named 'missing_thing'" in done.stderr
    for args in ([], ["-m"], ["--wrong", "s.py"]):
        assert run([*P3_RUN, *args], tmp_path).returncode == 2


def test_what_main_defines_can_be_pickled_and_spawned(tmp_path):
    text = """
import multiprocessing, pickle
class Thing: pass
def double(x): return 2 * x
if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(double, [1, 2]))
"""
    done = run([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path)
    assert done.stdout == "[2, 4]\n[2, 4]\n", done.stderr


def test_threads_of_the_script_are_waited_for(tmp_path):
    text = """
import threading
asked, enumerate_threads = threading.Event(), threading.enumerate
def enumerate():
    asked.set()
    return enumerate_threads()
threading.enumerate = enumerate
threading.Thread(target=lambda: asked.wait() and print("done")).start()
"""
    assert run([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path).stdout == "done\n"


@pytest.mark.parametrize(
    ("signum", "code", "last"),
    [(signal.SIGINT, 130, b"KeyboardInterrupt"), (signal.SIGTERM, 143, b"")],
)
def test_signals_unwind_the_script(tmp_path, signum, code, last):
    text = """
import signal
try:
    print("ready", flush=True)
    signal.pause()
finally:
    print("unwound")
"""
    with started([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path) as process:
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (stdout, process.returncode) == (b"unwound\n", code)
    assert stderr.strip().split(b"\n")[-1] == last


def test_sigterm_in_a_forked_child_is_the_childs_own(tmp_path):
    text = """
import os, signal
child = os.fork()
if child == 0:
    try:
        signal.pause()
    finally:
        print("unwound", flush=True)
os.kill(child, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    assert run([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path).stdout == "15\n"


# roles

SERVES = """
import os, sys
import p3.scheduler, p3.server
def serve(settings):
    print(settings.role, settings.launched, os.environ.get("DMLC_ROLE"), sys.path[0])
    return 7
p3.scheduler.serve = p3.server.serve = serve
from p3.__main__ import main
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_scheduler_or_server_serves_and_never_runs_the_script(tmp_path, role):
    script = write(tmp_path / "s" / "train.py", "print('ran')")
    for args in ([str(script), "--lr", "1"], ["-m", "not.even.there"], []):
        command = [sys.executable, "-c", SERVES, *args]
        done = run(command, tmp_path, DMLC_ROLE=role, **JOB)
        assert done.returncode == 7, done.stderr
        assert done.stdout.startswith(f"{role} True None ")
        if args[:1] == [str(script)]:
            assert done.stdout.split()[-1] == str(script.parent)  # for P3_ALLOW_OPTIMIZERS


def test_failures_of_a_server_are_one_line(tmp_path):
    code = SERVES.replace("return 7", "from p3.errors import PeerError; raise PeerError('no peer')")
    done = run([sys.executable, "-c", code], tmp_path, DMLC_ROLE="server", **JOB)
    assert (done.returncode, done.stderr) == (1, "p3 server: no peer\n")


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE='boss'"),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "many"}, "DMLC_NUM_WORKER='many'"),
        ({"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": ""}, "DMLC_PS_ROOT_URI is not"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(tmp_path, env, complaint):
    write(tmp_path / "s.py", "print('ran')")
    done = run([*P3_RUN, "s.py"], tmp_path, **{**JOB, **env})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("p3 run: ") and complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_without_a_secret_only_loopback(tmp_path, role):
    write(tmp_path / "s.py", "print('ran')")
    away = {**JOB, "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "192.0.2.1", "P3_SECRET": ""}
    done = run([*P3_RUN, "s.py"], tmp_path, **away)
    assert (done.returncode, done.stdout) == (2, "")
    assert "export P3_SECRET=$(openssl rand -hex 32)" in done.stderr
    assert "P3_SECRET_FILE" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_script_without_a_role_is_told_that_p3_is_there(tmp_path):
    text = "import os, sys; print(os.environ['P3_LAUNCHED'], 'p3' in sys.modules)"
    assert run([*P3_RUN, write(tmp_path / "s.py", text)], tmp_path).stdout == "1 True\n"


# two hosts

STORE = """
import mxnet as mx
kv = mx.kv.create("dist_sync_p3")
value = mx.nd.full((40,), kv.rank + 1)
kv.init(3, mx.nd.zeros((40,)))
kv.push(3, value)
kv.pull(3, out=value)
print(kv.num_workers, set(value.asnumpy()))
"""


@pytest.fixture
def hosts():
    """Two network namespaces joined by a veth pair: {name: address}."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"p3run{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.211.7.1", "10.211.7.2"]
    links = [f"p3{os.getpid()}{side}" for side in "ab"]

    def ip(*args):
        subprocess.run(["ip", *args], check=True, timeout=TIMEOUT_S)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1])
        ip("link", "set", links[1], "netns", names[1])
        for name, link, address in zip(names, links, addresses):
            ip("-n", name, "addr", "add", address + "/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield dict(zip(names, addresses))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", ["P3_SECRET", "P3_SECRET_FILE"])
def test_a_job_of_two_hosts_under_the_contract(tmp_path, hosts, how):
    write(tmp_path / "s.py", STORE)
    secret = write(tmp_path / "secret", "0123456789abcdef" * 4)
    first, second = hosts
    job = {**JOB, "DMLC_PS_ROOT_URI": hosts[first], "DMLC_PS_ROOT_PORT": "9091"}
    job[how] = str(secret) if how == "P3_SECRET_FILE" else secret.read_text()
    roles = [("scheduler", first), ("server", second), ("worker", first), ("worker", second)]
    processes = []
    try:
        for role, host in roles:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *P3_RUN, "s.py"],
                    cwd=tmp_path,
                    env=environment(**job, DMLC_ROLE=role),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert outputs == ["", "", "2 {3.0}\n", "2 {3.0}\n"]


# the command line


@pytest.mark.parametrize(
    ("argv", "options", "script"),
    [
        ([], [], None),
        (["-n", "2"], ["-n", "2"], None),
        (["s.py"], [], Script("s.py", [])),
        (["-n", "2", "s.py", "-n", "3"], ["-n", "2"], Script("s.py", ["-n", "3"])),
        (["-n2", "--native", "s.py"], ["-n2", "--native"], Script("s.py", [])),
        (["--native", "--", "-s.py", "--"], ["--native"], Script("-s.py", ["--"])),
        (["-n", "2", "-m", "a.b", "-m"], ["-n", "2"], Script("a.b", ["-m"], is_module=True)),
        (["-ma", "x"], [], Script("a", ["x"], is_module=True)),
    ],
)
def test_options_end_where_the_script_begins(argv, options, script):
    assert scripts.split(argv, valued=("-n",)) == (options, script)
    if script is not None:
        assert scripts.split(script.command()) == ([], script)


def test_help_and_version(tmp_path):
    def p3(*args):
        return run([sys.executable, "-m", "p3", *args], tmp_path)

    assert p3("--version").stdout == "p3 0.1.0\n"
    for args in (["--help"], ["launch", "--help"], ["run", "--help"]):
        done = p3(*args)
        assert done.returncode == 0 and "examples:" in done.stdout
    assert p3().returncode == 2
    assert "invalid choice: 'lunch'" in p3("lunch").stderr
