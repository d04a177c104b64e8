"""The lab of slow links: real rates, and nothing left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import netlab  # noqa: E402
from benchmarks.netlab import NetLab, NetLabError  # noqa: E402

OBSTACLE = netlab.obstacle()
needs_lab = pytest.mark.skipif(OBSTACLE is not None, reason=f"no network lab: {OBSTACLE}")
WATCHDOG_S = 60

RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, _ = listener.accept()
count, started = 0, time.monotonic()
while True:
    piece = peer.recv(1 << 16)
    if not piece:
        break
    count += len(piece)
print(count, time.monotonic() - started, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), 30)
peer.sendall(bytes(int(sys.argv[2])))
peer.close()
"""


def mine() -> list:
    return [
        name for name in netlab.namespaces() if name.startswith(f"{netlab.PREFIX}-{os.getpid()}-")
    ]


def start(host: netlab.Host, program: str, *arguments: str) -> subprocess.Popen:
    return host.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


@needs_lab
def test_a_transfer_is_no_faster_than_the_link_and_not_much_slower():
    rate_bps, size = 40e6, 4_000_000
    with NetLab(hosts=2, rate_bps=rate_bps) as lab:
        receiver = start(lab.hosts[1], RECEIVE, lab.hosts[1].address)
        assert receiver.stdout.readline() == "ready\n"
        sender = start(lab.hosts[0], SEND, lab.hosts[1].address, str(size))
        output, _ = receiver.communicate(timeout=WATCHDOG_S)
        assert sender.wait(WATCHDOG_S) == 0
    count, seconds = output.split()
    assert int(count) == size
    burst = 2 * 64_000 + 100_000  # what both directions' buckets and the last queue hold back
    assert float(seconds) >= (size - burst) * 8 / rate_bps
    assert float(seconds) < 10 * size * 8 / rate_bps
    assert mine() == []


@needs_lab
def test_an_exception_leaves_neither_namespaces_nor_processes():
    with pytest.raises(ZeroDivisionError):
        with NetLab(hosts=2, rate_bps=1e9) as lab:
            sleeper = lab.hosts[0].run(["sleep", "1000"])
            assert len(mine()) == 3
            1 / 0  # noqa: B018
    assert sleeper.poll() is not None
    assert mine() == []


@needs_lab
def test_two_labs_at_once_do_not_meet():
    with NetLab(hosts=1, rate_bps=1e9) as first, NetLab(hosts=1, rate_bps=1e9) as second:
        assert first.hosts[0].name != second.hosts[0].name
        assert first.hosts[0].address == second.hosts[0].address
    assert mine() == []


def run_lab_owner() -> subprocess.Popen:
    """A process with a lab and a sleeper in it; prints the sleeper's pid and waits."""
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from benchmarks.netlab import NetLab
        with NetLab(hosts=1, rate_bps=1e9) as lab:
            sleeper = lab.hosts[0].run(["sleep", "1000"])
            print(sleeper.pid, lab.hosts[0].name, flush=True)
            sleeper.wait()
    """)
    return subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT)], stdout=subprocess.PIPE, text=True
    )


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while netlab._start_time(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number):
    owner = run_lab_owner()
    pid, name = owner.stdout.readline().split()
    owner.send_signal(number)
    owner.communicate(timeout=WATCHDOG_S)
    assert owner.returncode != 0
    assert name not in netlab.namespaces()
    wait_until_gone(int(pid))


@needs_lab
def test_what_a_killed_owner_left_is_swept():
    owner = run_lab_owner()
    pid, name = owner.stdout.readline().split()
    owner.kill()
    owner.wait(WATCHDOG_S)
    owner.stdout.close()
    assert name in netlab.namespaces()
    netlab.sweep()
    assert name not in netlab.namespaces()
    wait_until_gone(int(pid))


@needs_lab
def test_a_living_owner_is_left_alone():
    with NetLab(hosts=1, rate_bps=1e9) as lab:
        netlab.sweep()
        assert lab.hosts[0].name in netlab.namespaces()


def test_senseless_labs_are_refused():
    with pytest.raises(ValueError, match="hosts"):
        NetLab(hosts=0, rate_bps=1e9)
    with pytest.raises(ValueError, match="bits a second"):
        NetLab(hosts=2, rate_bps=4)


def test_a_failing_command_is_quoted():
    with pytest.raises(NetLabError, match="ls /nowhere"):
        netlab.command("ls", "/nowhere")
