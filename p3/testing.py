"""A job of real processes on this machine, for tests: ``LocalCluster``.

    with LocalCluster(workers=2, servers=2) as cluster:
        results = cluster.run(train, 0.1)  # train(0.1) in every worker; the results by rank

Importing MXNet takes seconds, so start one cluster and run many functions on it: each makes
stores of its own (``mx.kv.create``), and no store sees another's keys.

Who owns what: the caller's thread owns the cluster, the processes and its end of a socket to
each of them.  A worker runs what comes over its socket and ends, in peace, when that is
closed; so nothing is left even if the caller is killed.  Servers and scheduler never use
theirs, but its end tells that they have ended.  Nothing waits without a deadline: when it
has passed, every process is made to write down where it is (faulthandler) and is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, Callable, Dict, List, Mapping, Optional, Tuple

from p3 import config
from p3.errors import PeerError, UsageError
from p3.launch import local
from p3.launch.script import Script

_START_S = 240.0  # MXNet is imported in every process, by as many as there are cores at a time
_FOLLOW_S = 5.0  # when one rank has raised, the others may wait for it for ever
_END_S = 30.0
_TAIL_CHARS = 10_000

Outcome = Tuple[Optional[str], Any]  #: what a worker sends back: (traceback, result)


class LocalCluster:
    """A scheduler, servers and workers on loopback, alive within a ``with`` block.

    In the block every worker has joined the job and imported MXNet.  Not thread-safe.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        env: Optional[Mapping[str, str]] = None,
        deadline_s: float = 30.0,
    ) -> None:
        """``env``: variables for all processes, such as ``{"P3_SLICE_ELEMS": "8"}``.

        ``deadline_s``: how long each ``run`` may take.
        """
        self._workers, self._servers = workers, servers
        self._env, self._deadline_s = dict(env or {}), deadline_s
        self._processes: Dict[str, _Process] = {}
        self._ranks: List[_Process] = []

    def __enter__(self) -> LocalCluster:
        """Start the job; raises ``PeerError`` with the processes' output if it does not."""
        script = Script("p3.testing", [], is_module=True)
        env = {**config.environment(), "P3_SECRET": "", "P3_SECRET_FILE": "", **self._env}
        with local.reserved_port() as port, contextlib.ExitStack() as undo:
            undo.callback(self._kill)
            env = local.job_env(env, port, self._workers, self._servers, native=False)
            for spec in local.specs(script, env, self._workers, self._servers, native=False):
                process = self._processes[spec.name] = _Process(spec.command, spec.env)
                if spec.is_worker:
                    self._ranks.append(process)
            self._gather(_START_S, "to start")
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the job; raises ``PeerError`` if a process does not end by itself."""
        for process in self._processes.values():
            process.socket.close()
        end = time.monotonic() + _END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes.values():
                process.popen.wait(max(0.0, end - time.monotonic()))
        if None in self.exit_codes.values():
            self._give_up(f"did not end within {_END_S:g} s")

    @property
    def alive(self) -> bool:
        """Whether every process is there, so that ``run`` can be called (again)."""
        return bool(self._ranks) and set(self.exit_codes.values()) == {None}

    @property
    def exit_codes(self) -> Dict[str, Optional[int]]:
        """``{"scheduler": 0, "server 0": 0, "worker 0": 0, ...}``; ``None``: still running."""
        return {name: process.popen.poll() for name, process in self._processes.items()}

    def output(self, name: str) -> str:
        """What the process of that name (see ``exit_codes``) has printed so far."""
        return self._processes[name].output()

    def send_signal(self, name: str, signum: int) -> None:
        """Send a signal, such as SIGSTOP, to the process of that name."""
        self._processes[name].popen.send_signal(signum)

    def run(self, function: Callable[..., Any], *args: Any) -> List[Any]:
        """Call ``function(*args)`` in every worker at once; return the results by rank.

        ``function`` must be at the top of a module that can be imported; arguments and
        results are pickled.  Blocks until all have returned and MXNet has nothing left to do.
        Raises ``PeerError`` with the ranks' tracebacks if any raised (the cluster lives on),
        and with every process's output if one ended or the deadline passed (it does not).
        """
        name = f"{function.__module__}.{function.__qualname__}"
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise UsageError(f"{name} cannot be imported: put it at the top of a module")
        call = pickle.dumps((function, args))
        for process in self._ranks:
            process.socket.send((sys.path, self._deadline_s))
            process.socket.send_bytes(call)
        return self._gather(self._deadline_s, name)

    def _gather(self, timeout_s: float, what: str) -> List[Any]:
        """One answer of every worker, by rank."""
        answers: Dict[_Process, Outcome] = {}
        end, began = time.monotonic() + timeout_s, time.monotonic()
        while len(answers) < len(self._ranks):
            ready = wait(self._open_sockets(answers), max(0.0, end - time.monotonic()))
            if not ready:
                late = [name for name, p in self._named(self._ranks) if p not in answers]
                passed = time.monotonic() - began
                self._give_up(
                    f"{what}: no answer from {', '.join(late)} after {passed:.0f} s", answers
                )
            for name, process in self._processes.items():
                if process.socket in ready:
                    try:
                        answers[process] = process.socket.recv()
                    except (EOFError, ConnectionError):
                        self._give_up(f"{what}: {name} has ended", answers)
                    if answers[process][0] is not None:
                        end = min(end, time.monotonic() + _FOLLOW_S)
        self._raise_failure(what, answers)
        return [answers[process][1] for process in self._ranks]

    def _open_sockets(self, answers: Mapping[_Process, Outcome]) -> List[Connection]:
        return [p.socket for p in self._processes.values() if p not in answers]

    def _named(self, some: List[_Process]) -> List[Tuple[str, _Process]]:
        return [(name, process) for name, process in self._processes.items() if process in some]

    def _raise_failure(self, what: str, answers: Mapping[_Process, Outcome]) -> None:
        """Raise if a worker's answer is a traceback."""
        failed = {rank: answers[p][0] for rank, p in enumerate(self._ranks) if answers[p][0]}
        if failed:
            texts = [f"rank {rank}: {text}" for rank, text in failed.items()]
            raise PeerError("\n".join([what, *texts]), "worker", min(failed))

    def _give_up(self, why: str, answers: Optional[Mapping[_Process, Outcome]] = None) -> None:
        """End all processes and raise what is known."""
        raised = [text for text, _ in (answers or {}).values() if text]
        self._kill()
        outputs = [
            f"--- {name}, exit code {process.popen.returncode}:\n{process.output()[-_TAIL_CHARS:]}"
            for name, process in self._processes.items()
        ]
        raise PeerError("\n".join([why, *raised, *outputs]))

    def _kill(self) -> None:
        """End what is still there; each process writes its threads' stacks first."""
        for process in self._processes.values():
            process.socket.close()
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGABRT)
        for process in self._processes.values():
            try:
                process.popen.wait(5.0)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()

    def __repr__(self) -> str:
        return f"<LocalCluster {self.exit_codes}>"


class _Process:
    """A process of the job, its output in a file, and our end of the socket to it."""

    def __init__(self, command: List[str], env: Dict[str, str]) -> None:
        self.socket, theirs = Pipe()
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with us
        with theirs:
            self.popen = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**env, "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )

    def output(self) -> str:
        descriptor = self._file.fileno()  # pread: the offset is the process's, too
        written = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        lines = written.decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("Extension modules:"))


def _obey(socket: Connection) -> None:
    """A worker's life: join the job, then call what comes until the socket is closed."""
    import mxnet

    from p3 import node

    node.enlist().join()
    socket.send((None, None))
    while True:
        try:
            path, deadline_s = socket.recv()
            call = socket.recv_bytes()
        except EOFError:
            return
        sys.path += [entry for entry in path if entry not in sys.path]
        # only if nobody is left to see to it
        faulthandler.dump_traceback_later(2 * deadline_s, exit=True)
        socket.send_bytes(_call(call, mxnet))
        faulthandler.cancel_dump_traceback_later()


def _call(call: bytes, mxnet: Any) -> bytes:
    """Call what was pickled; the outcome, pickled."""
    outcome: Outcome
    try:
        function, args = pickle.loads(call)  # noqa: S301 - of the process that started us
        outcome = (None, function(*args))
        mxnet.nd.waitall()
        return pickle.dumps(outcome)
    except Exception:  # noqa: BLE001 - whatever it is, the caller raises it
        return pickle.dumps((traceback.format_exc(), None))


if __name__ == "__main__":
    _obey(Connection(int(sys.argv[1])))
