"""``p3 launch``: a whole job on this machine, for trying out and for one big machine.

Starts a scheduler, the servers and the workers, all on 127.0.0.1, and ends when all have
ended, with the exit code of the process that failed first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
from typing import Dict, Iterator, List, Optional

from p3 import config
from p3.config import SCHEDULER, SERVER, WORKER
from p3.errors import UsageError
from p3.launch import script as scripts
from p3.launch.job import Job, Spec
from p3.launch.script import Script

LOOPBACK = "127.0.0.1"

_EPILOG = """\
Each line of output begins with the role of the process it comes from. A job ends with the
exit code of the process that failed first, 130 after Ctrl-C, 143 after SIGTERM.

examples:
  p3 launch -n 2 train.py --lr 0.1
  p3 launch -n 4 -s 2 -m mypackage.train --lr 0.1
  p3 launch -n 2 --replace train.py --kvstore dist_sync     (p3, under MXNet's name)
  p3 launch -n 2 --native train.py --kvstore dist_sync      (MXNet's own, to compare)
"""


def main(argv: List[str]) -> int:
    """The command; returns the exit code when no process of the job is left."""
    parser = _parser()
    before, script = scripts.split(argv, valued=("-n", "--workers", "-s", "--servers"))
    options = parser.parse_args(before)
    if script is None:
        parser.error("a SCRIPT, or -m and a module, is needed")
    if not script.is_module and not os.path.exists(script.target):
        raise UsageError(f"there is no script {script.target!r} in {os.getcwd()}")
    servers = options.servers or options.workers
    env = config.environment()
    with reserved_port() as port:
        env = job_env(env, port, options.workers, servers, options.native)
        if options.replace:
            env["P3_REPLACE_NATIVE"] = "1"
        processes = specs(script, env, options.workers, servers, options.native)
        return Job(processes, colour="NO_COLOR" not in env).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p3 launch",
        usage="p3 launch [-h] -n W [-s S] [--replace | --native]"
        " SCRIPT ARGS... | -m MODULE ARGS...",
        description="Start a job on this machine: a scheduler, servers and workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--workers", type=_count, required=True, metavar="W", help="number of workers"
    )
    parser.add_argument(
        "-s", "--servers", type=_count, metavar="S", help="number of servers (default: W)"
    )
    scripts.add_stores(
        parser, "start MXNet's own scheduler and servers, for a script that uses dist_sync"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, 1 or more")
    return int(text)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port, kept from others until the end.

    The socket is bound but does not listen, so the scheduler, whose socket allows address
    reuse as well, can listen there, and the system gives the port to nobody else.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, 0))
        yield sock.getsockname()[1]


def job_env(
    env: Dict[str, str], port: int, workers: int, servers: int, native: bool
) -> Dict[str, str]:
    """The environment that all processes of the job share."""
    unwanted = ("DMLC_INTERFACE", "DMLC_WORKER_ID", "DMLC_SERVER_ID", "P3_LAUNCHED")
    env = {name: value for name, value in env.items() if name not in unwanted}
    env.update(
        DMLC_PS_ROOT_URI=LOOPBACK,
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_NUM_WORKER=str(workers),
        DMLC_NUM_SERVER=str(servers),
        DMLC_NODE_HOST=LOOPBACK,
        PYTHONUNBUFFERED="1",
    )
    if not native and not env.get("P3_SECRET") and not env.get("P3_SECRET_FILE"):
        env["P3_SECRET"] = secrets.token_hex(32)
    return env


def specs(
    script: Script, env: Dict[str, str], workers: int, servers: int, native: bool
) -> List[Spec]:
    """The processes of a job: ``scheduler``, ``server 0``, ..., ``worker 0``, ... run ``script``.

    Each starts as ``p3 run``; ``env`` is what ``job_env`` made.
    """
    command = [sys.executable, "-m", "p3", "run", *(["--native"] if native else [])]
    command += script.command()

    def spec(role: str, rank: Optional[int] = None) -> Spec:
        own = {"DMLC_ROLE": role}
        if rank is not None:
            own[f"DMLC_{role.upper()}_ID"] = str(rank)
        name = role if rank is None else f"{role} {rank}"
        return Spec(name, command, {**env, **own}, role == WORKER)

    return [
        spec(SCHEDULER),
        *(spec(SERVER, rank) for rank in range(servers)),
        *(spec(WORKER, rank) for rank in range(workers)),
    ]
