"""The processes of one run: started, followed, ended."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Dict, Iterator, List, Optional

from benchmarks.netlab import Host, end_group

SILENCE_S = 90  # training prints every few seconds; a run that is silent for so long hangs


class RunError(Exception):
    """A run failed; the message has the end of its log."""


class Job:
    """The processes of one run, each with a log in `folder`, ended when the job is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: Dict[str, Popen] = {}
        self.shown: Dict[str, int] = {}

    def start(
        self, name: str, argv: List[str], env: Dict[str, str], host: Optional[Host] = None
    ) -> None:
        """Start a process, on a host of a lab or right here."""
        log = self.log(name).open("wb")
        with log:
            if host:
                process = host.run(argv, env, stdout=log, stderr=STDOUT)
            else:
                process = Popen(
                    argv,
                    env={**os.environ, **env},
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                )
        self.processes[name] = process

    def log(self, name: str) -> Path:
        """Where a process's output goes."""
        return self.folder / f"{name}.log"

    def wait(self, silence_s: Optional[float] = None) -> None:
        """Show the workers' output until all processes have ended; RunError if one fails.

        `silence_s`: seconds without any output after which the run has failed too.
        """
        silence_s = silence_s or SILENCE_S
        deadline = time.monotonic() + silence_s
        running = dict(self.processes)
        while running:
            for name, process in list(running.items()):
                code = process.poll()
                if self.show(name):
                    deadline = time.monotonic() + silence_s
                if code:
                    raise RunError(f"{name} ended with code {code}:\n{self.tail(name)}")
                if code == 0:
                    del running[name]
            if running and time.monotonic() > deadline:
                tails = "\n".join(f"{name}:\n{self.tail(name)}" for name in running)
                raise RunError(f"silent for {silence_s} s:\n{tails}")
            time.sleep(0.1)

    def show(self, name: str) -> bool:
        """Print a worker's new lines; whether there were any."""
        if name.startswith(("scheduler", "server")):
            return False
        before = self.shown.get(name, 0)
        with self.log(name).open(errors="replace") as log:
            log.seek(before)
            for line in iter(log.readline, ""):
                if not line.endswith("\n"):
                    break
                print(f"    {line}", end="", flush=True)
                self.shown[name] = log.tell()
        return self.shown.get(name, 0) > before

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a log."""
        text = self.log(name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"    {line}" for line in text) or "    (it printed nothing)"


@contextlib.contextmanager
def job(folder: Path) -> Iterator[Job]:
    """A Job whose processes are gone afterwards."""
    folder.mkdir()
    made = Job(folder)
    try:
        yield made
    finally:
        for process in made.processes.values():
            end_group(process)
