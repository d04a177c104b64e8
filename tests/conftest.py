"""What tests of several files share: clusters, each topology started once; jobs of the control
channel; and a proof that no process is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
from control_job import Job

from p3.testing import LocalCluster
from p3.transport.curve import derive
from p3.transport.inproc import InprocNetwork, InprocPort
from p3.transport.zmq_port import ZmqPort

DEADLINE_S = 60  # of every call; twice what a busy machine of two cores needs
#: so that toy arrays are cut and cross servers; computing with one thread, for there are many
TOY = {"P3_SLICE_ELEMS": "8", "OMP_NUM_THREADS": "1"}


def pytest_configure():
    """In the background a shell has its jobs ignore Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def clusters():
    """``clusters(workers, servers, **env)``: a running cluster."""
    with contextlib.ExitStack() as stack:
        running = {}

        def get(workers, servers, **env):
            topology = (workers, servers, *sorted(env.items()))
            if topology not in running or not running[topology].alive:
                cluster = LocalCluster(workers, servers, {**TOY, **env}, DEADLINE_S)
                running[topology] = stack.enter_context(cluster)
            return running[topology]

        yield get
    for topology, cluster in running.items():
        codes = set(cluster.exit_codes.values())
        assert codes <= {0, -signal.SIGABRT}, f"{topology}: {cluster.exit_codes}"


@pytest.fixture
def pair(clusters):
    """Two workers and two servers, slices of eight elements."""
    return clusters(2, 2)


@pytest.fixture
def single(clusters):
    """One worker, so its numbers are those of one process bit for bit, and three servers."""
    return clusters(1, 3)


@pytest.fixture
def trio(clusters):
    """Three workers and a server."""
    return clusters(3, 1)


@pytest.fixture
def naive(clusters):
    """Two workers whose MXNet runs each operation in the caller's thread."""
    return clusters(2, 1, MXNET_ENGINE_TYPE="NaiveEngine")


@pytest.fixture
def default_slices(clusters):
    """Two workers with the slices that p3 chooses by itself."""
    return clusters(2, 1, P3_SLICE_ELEMS="")


@pytest.fixture(scope="session")
def alone():
    """``alone(function, *args)``: the result of a call in a process without any launcher."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _set_environment, (TOY,)) as pool:

        def call(function, *args):
            return pool.submit(function, *args).result(DEADLINE_S + 90)  # it imports MXNet

        yield call


@pytest.fixture(params=["inproc", "zmq"])
def new_port(request):
    """A factory of ports that can reach each other."""
    if request.param == "inproc":
        network = InprocNetwork()
        return lambda: InprocPort(network)
    keys = derive(b"a secret")
    return lambda: ZmqPort(keys)


@pytest.fixture
def new_job(new_port):
    """A factory of jobs, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            job = Job(new_port, **settings)
            stack.callback(job.close)
            return job

        yield make
    assert not [thread for thread in threading.enumerate() if thread.name == "p3-control"]


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


def _set_environment(variables):
    os.environ.update(variables)
