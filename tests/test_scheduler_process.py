"""The scheduler as a process of its own: signals, its last words, its address."""

import contextlib
import signal
import socket
import subprocess
import sys

import pytest
from control_job import DEADLINE_S, LOCAL, Node, wait_missing

from p3.config import SCHEDULER, WORKER, Settings
from p3.control import PeerFailed
from p3.errors import UsageError
from p3.scheduler.process import serve
from p3.transport.curve import derive
from p3.transport.zmq_port import ZmqPort

SERVE = """
import sys
from p3.config import Settings
from p3.scheduler.process import serve
sys.exit(serve(Settings(root_port=int(sys.argv[1]), start_timeout_s=float(sys.argv[2]))))
"""


@contextlib.contextmanager
def scheduler_process(start_timeout_s):
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        number = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(number), str(start_timeout_s)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"tcp://{LOCAL}:{number}"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_fail_the_job(number):
    with scheduler_process(60) as (process, address):
        node = Node(ZmqPort(derive(None)), address, Settings(), WORKER)
        wait_missing(node, "1 server")
        process.send_signal(number)
        event = node.event(PeerFailed)
        assert (event.role, event.reason) == (SCHEDULER, "the scheduler was stopped")
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr.read() == "p3 scheduler: the scheduler was stopped\n"
        node.client.close()


def test_the_process_says_who_is_missing():
    with scheduler_process(0.2) as (process, _):
        assert process.wait(DEADLINE_S) == 1
        (line,) = process.stderr.read().splitlines()
        assert "missing 1 worker, 1 server" in line


def test_an_address_that_cannot_be_bound():
    with pytest.raises(UsageError, match=r"no\.such\.host\.invalid"):
        serve(Settings(root_host="no.such.host.invalid"))
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        with pytest.raises(UsageError, match=str(taken.getsockname()[1])):
            serve(Settings(root_port=taken.getsockname()[1]))
