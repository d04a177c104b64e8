"""Commands that tests run as a user would, in processes of their own with a watchdog."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence, Union

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120
Folder = Optional[Union[str, Path]]


def environment(**more: str) -> Dict[str, str]:
    """This process's variables without those of a job, and with p3 to be found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    return {**env, "PYTHONPATH": str(ROOT), **more}


def run(
    command: Sequence[object], cwd: Folder = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """The command, finished, with its output and its errors apart."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_merged(
    command: Sequence[str], timeout_s: float = TIMEOUT_S, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The command, finished, with its errors among its output; ``how`` is for ``subprocess``."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        **how,
    )


@contextlib.contextmanager
def started(
    command: Sequence[object], cwd: Folder = None, ready: int = 1, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, started, once ``ready`` of its processes have said so; killed in the end.

    It says nothing else before that, unless it is a launcher, which names the process in each line.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what is read here is no more than these lines
    )
    try:
        for _ in range(ready):
            line = process.stdout.readline()
            while line.split(b"| ")[-1] != b"ready\n":
                assert b" | " in line, line or process.stderr.read()
                line = process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
