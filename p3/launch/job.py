"""Runs the processes of a job on this machine until the last has ended.

One thread, one ``select`` loop; nothing is shared.  What wakes it: output of a process, a
report of a failure (a pipe all processes may write their pid to), a signal (SIGCHLD, SIGINT,
SIGTERM, SIGHUP, through the wake-up descriptor), the time of the next step of an ending.

Every process leads a session of its own.  So a Ctrl-C reaches the launcher alone, which
passes it on once; and when a process has ended, what it started and left behind is killed
with its group, before its id is free for others.  If the launcher is killed itself,
``guard`` kills the groups.

An ending is a list of steps, (seconds, signal): who is left at that time gets the signal.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from p3.launch.output import STDERR, STDOUT, Line, Lines, Printer

Steps = Sequence[Tuple[float, int]]

#: after a failure the others hear of it from the scheduler, and end by themselves
FAILED: Steps = ((5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
#: after the workers have ended well, servers and scheduler do so by themselves
FINISHED: Steps = ((5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
INTERRUPTED: Steps = ((0.0, signal.SIGINT), (2.5, signal.SIGTERM), (4.0, signal.SIGKILL))
TERMINATED: Steps = ((0.0, signal.SIGTERM), (4.0, signal.SIGKILL))
AT_ONCE: Steps = ((0.0, signal.SIGKILL),)

_DRAIN_S = 1.0  # how long output may outlive its process (one that left its group holds it)
_CHUNK_BYTES = 65536
_SELF = "p3"


class Spec(NamedTuple):
    """A process to start."""

    name: str  # its role and rank
    command: List[str]
    env: Dict[str, str]
    is_worker: bool


class _Process:
    """A process that was started; ``code`` once it has ended."""

    def __init__(self, spec: Spec, report_fd: int) -> None:
        self.name, self.is_worker = spec.name, spec.is_worker
        self.signalled = False
        self.code: Optional[int] = None
        self.popen = subprocess.Popen(
            spec.command,
            env={**spec.env, "P3_REPORT_FD": str(report_fd)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(report_fd,),
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self.popen.pid

    def ended(self) -> bool:
        """Whether it has ended; its id stays taken until ``reap``."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        code = self.popen.wait()
        self.code = code if code >= 0 else 128 - code

    def fate(self) -> str:
        """How it ended, in words."""
        code = self.popen.returncode
        if code >= 0:
            return f"{self.name} exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} was killed by signal {-code}"


class Job:
    """A job's processes, from start to end."""

    def __init__(
        self, specs: Sequence[Spec], colour: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._specs, self._clock = specs, clock
        self._printer = Printer([_SELF, *(spec.name for spec in specs)], colour)
        self._alive: List[_Process] = []
        self._failures: List[_Process] = []  # in the order in which they ended
        self._reports: List[int] = []  # pids, in the order in which they failed
        self._steps: List[Tuple[float, int]] = []
        self._interrupt: Optional[int] = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start the processes, wait for all to end, return the job's exit code.

        That is 128 + N if signal N ended the job, else the code of the process that failed
        first, else 0.  No process is left, whatever happens.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._printer.close)
            wake = stack.enter_context(_signals())
            self._selector.register(wake, selectors.EVENT_READ, self._on_signals)
            reports, report_fd = os.pipe()
            stack.callback(os.close, reports)
            stack.callback(os.close, report_fd)
            self._selector.register(reports, selectors.EVENT_READ, self._on_report)
            self._guard = stack.enter_context(_guard())
            stack.callback(self._kill_all)
            for spec in self._specs:
                self._start(spec, report_fd)
            while self._alive:
                self._turn()
            self._drain_all()
        return self._verdict()

    def _start(self, spec: Spec, report_fd: int) -> None:
        process = _Process(spec, report_fd)
        self._tell_guard("+", process)
        self._alive.append(process)
        for stream, pipe in ((STDOUT, process.popen.stdout), (STDERR, process.popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, _Source(process, stream))

    def _turn(self) -> None:
        """Wait for what comes next and see to it."""
        timeout = max(self._steps[0][0] - self._clock(), 0.0) if self._steps else None
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, _Source):
                self._pump(key)
            else:
                key.data(key.fd)
        for process in [process for process in self._alive if process.ended()]:
            self._bury(process)
        if self._printer.broken and self._interrupt is None:
            self._end_by(signal.SIGPIPE)
        while self._steps and self._steps[0][0] <= self._clock():
            self._signal_all(self._steps.pop(0)[1])

    # what wakes the loop

    def _on_signals(self, fd: int) -> None:
        for signum in os.read(fd, _CHUNK_BYTES):
            if signum != signal.SIGCHLD:
                self._end_by(signum)

    def _on_report(self, fd: int) -> None:
        pids = [int(pid) for pid in os.read(fd, _CHUNK_BYTES).split()]
        failed = [process.pid for process in self._alive if not process.signalled]
        self._reports.extend(pid for pid in pids if pid in failed)
        if self._reports:
            self._begin(FAILED)

    def _pump(self, key: selectors.SelectorKey) -> bool:
        """Pass on what a process has written; return whether there may be more."""
        source: _Source = key.data
        try:
            data = os.read(key.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        lines = source.lines.feed(data) if data else source.lines.flush()
        for line in lines:
            self._printer.write(source.process.name, source.stream, line)
        if not data:
            self._selector.unregister(key.fileobj)
        return bool(data)

    # endings

    def _bury(self, process: _Process) -> None:
        """A process has ended: take its last words and see what follows from its end."""
        process.kill_group()
        for key in self._sources(process):
            while self._pump(key):
                pass
        process.reap()
        self._tell_guard("-", process)
        self._alive.remove(process)
        if process.code != 0 and (not process.signalled or process.pid in self._reports):
            self._failures.append(process)
            self._say(process.fate())
            self._begin(FAILED)
        elif not any(other.is_worker for other in self._alive):
            self._begin(FINISHED)

    def _begin(self, steps: Steps) -> None:
        """Begin an ending, unless one is under way."""
        if not self._steps:
            now = self._clock()
            self._steps = [(now + delay_s, signum) for delay_s, signum in steps]

    def _end_by(self, signum: int) -> None:
        """A signal to the launcher ends the job; a second one at once."""
        again = self._interrupt is not None
        self._interrupt = self._interrupt or signum
        self._steps = []
        interrupted = signum == signal.SIGINT
        self._begin(AT_ONCE if again else INTERRUPTED if interrupted else TERMINATED)

    def _signal_all(self, signum: int) -> None:
        names = ", ".join(process.name for process in self._alive)
        if self._interrupt is None and names:
            self._say(f"still running: {names}; sending {signal.Signals(signum).name}")
        for process in self._alive:
            process.signalled = True
            if signum == signal.SIGKILL:
                process.kill_group()
            else:
                os.kill(process.pid, signum)

    def _kill_all(self) -> None:
        for process in self._alive:
            process.kill_group()
            process.reap()
        self._alive = []

    def _drain_all(self) -> None:
        """Pass on the rest of the output that others than the processes may still hold."""
        end = self._clock() + _DRAIN_S
        while self._sources() and self._clock() < end:
            for key, _ in self._selector.select(end - self._clock()):
                if isinstance(key.data, _Source):
                    self._pump(key)

    def _verdict(self) -> int:
        if self._interrupt is not None:
            return 128 + self._interrupt
        by_pid = {process.pid: process for process in self._failures}
        reported = [by_pid[pid] for pid in self._reports if pid in by_pid]
        for first in (*reported, *self._failures):
            if len(self._failures) > 1:
                self._say(f"the job failed; the first was: {first.fate()}")
            return first.code or 1
        return 0

    # helpers

    def _sources(self, process: Optional[_Process] = None) -> List[selectors.SelectorKey]:
        keys = self._selector.get_map().values()
        sources = [key for key in keys if isinstance(key.data, _Source)]
        return [key for key in sources if process is None or key.data.process is process]

    def _say(self, text: str) -> None:
        self._printer.write(_SELF, STDERR, Line(text.encode()))

    def _tell_guard(self, sign: str, process: _Process) -> None:
        with contextlib.suppress(OSError):
            os.write(self._guard, f"{sign}{process.pid}\n".encode())


class _Source:
    """One output stream of a process."""

    def __init__(self, process: _Process, stream: int) -> None:
        self.process, self.stream, self.lines = process, stream, Lines()


@contextlib.contextmanager
def _guard() -> Iterator[int]:
    """Start ``guard``; the descriptor to tell it of process groups."""
    path = os.path.join(os.path.dirname(__file__), "guard.py")
    with subprocess.Popen(
        [sys.executable, "-IS", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    ) as guard:
        assert guard.stdin is not None
        try:
            yield guard.stdin.fileno()
        finally:
            guard.kill()


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Turn signals into bytes, their numbers, to be read from the socket."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    caught = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup wants it ignored
        caught.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
    old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(old_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        receiver.close()
        sender.close()
