"""``p3 run``: one process of a job, in the role that the environment gives it.

    scheduler, server   serve until the job ends, and never run the script
    worker              runs the script, in which MXNet has p3's stores
    no role             runs the script; its store is embedded, one worker and no servers

The exit code is the script's, as with ``python SCRIPT``: 0, the number of ``sys.exit``, 1
after an exception, 130 after Ctrl-C, 143 after SIGTERM.  Wrong settings exit with 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import os
import signal
import sys
import threading
from typing import Any, List, Optional

from p3 import config, naming
from p3.config import SCHEDULER, SERVER, WORKER, Settings
from p3.errors import P3Error, UsageError
from p3.launch import script as scripts
from p3.launch.script import Outcome, Script

INTERRUPTED = 130

_EPILOG = """\
The role comes from DMLC_ROLE (worker, server or scheduler), and with it DMLC_PS_ROOT_URI,
DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER; optional are DMLC_WORKER_ID,
DMLC_NODE_HOST and DMLC_INTERFACE. P3_SECRET (or P3_SECRET_FILE), the same everywhere, is
needed as soon as the job leaves this machine. Without DMLC_ROLE the script just runs.

examples:
  DMLC_ROLE=worker DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9091 \\
      DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=2 p3 run train.py --lr 0.1
  p3 run -m mypackage.train --lr 0.1
"""


def main(argv: List[str]) -> int:
    """The command; returns the exit code.  Blocks for as long as the process's part lasts."""
    parser = _parser()
    options, script = scripts.split(argv)
    chosen = parser.parse_args(options)
    if chosen.replace or chosen.native:
        config.replace_native(chosen.replace)
    with _Report(config.take_report_fd()) as report:
        return report.failure((_run_native if chosen.native else _run)(parser, script, report))


def _run(parser: argparse.ArgumentParser, script: Optional[Script], report: _Report) -> int:
    settings = dataclasses.replace(Settings.from_env(), launched=True)
    config.adopt(settings)
    config.hide_role()
    if script is not None:
        scripts.set_path(script)
    if settings.role in (SCHEDULER, SERVER):
        return _serve(settings)
    if settings.role == WORKER and script is not None:
        _enlist(settings)
    outcome = _execute(parser, script)
    return outcome.code if report.forked() else _finish(outcome, settings, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p3 run",
        usage="p3 run [-h] [--replace | --native] SCRIPT ARGS... | -m MODULE ARGS...",
        description="Run one process of a job, in the role that the environment gives it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    scripts.add_stores(
        parser, "leave role, scheduler and servers to MXNet's own distributed stores"
    )
    return parser


def _run_native(parser: argparse.ArgumentParser, script: Optional[Script], _: _Report) -> int:
    """Run a process of a job of MXNet's own stores, which read the role by themselves."""
    naming.forbid("this job runs MXNet's own servers (--native), which p3's stores cannot use")
    if config.environment().get("DMLC_ROLE") in (SCHEDULER, SERVER):
        importlib.import_module("mxnet")  # serves, and exits when the job has ended
        return 0
    if script is not None:
        scripts.set_path(script)
    return _execute(parser, script).code


def _execute(parser: argparse.ArgumentParser, script: Optional[Script]) -> Outcome:
    if script is None:
        parser.error("a SCRIPT, or -m and a module, is needed")
    _raise_on_sigterm()
    return scripts.execute(script)


def _serve(settings: Settings) -> int:
    try:
        if settings.role == SCHEDULER:
            from p3.scheduler import serve
        else:
            from p3.server import serve
        return serve(settings)
    except UsageError:
        raise
    except P3Error as error:
        print(f"p3 {settings.role}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _enlist(settings: Settings) -> None:
    """Register with the scheduler now, so that nobody waits for a script that loads data."""
    from p3 import node

    node.enlist(settings)


def _finish(outcome: Outcome, settings: Settings, report: _Report) -> int:
    """Let the rest of the job know how the script ended; return the code to exit with."""
    if outcome.code == 0:
        _join_threads()
    _flush()
    node = sys.modules.get("p3.node")
    if node is None:
        return report.failure(outcome.code)
    if outcome.code == 0 and settings.num_workers > 1 and not node.created():
        outcome = _storeless(settings)
    report.failure(outcome.code)
    try:
        return int(node.finish(outcome.code, outcome.reason))
    except P3Error as error:
        print(f"p3 run: {error}", file=sys.stderr)
        return outcome.code or 1
    except KeyboardInterrupt:
        return outcome.code or INTERRUPTED


def _storeless(settings: Settings) -> Outcome:
    """Say that this job's script created none of p3's stores, and what to look for."""
    print(
        f"p3 run: ERROR: this job has {settings.num_workers} workers, but the script never"
        " created a p3 store, so each worker trained alone and their results differ.\n"
        "    Check that the store's name gets to MXNet:"
        " gluon.Trainer(..., kvstore='dist_sync_p3'), module.fit(..., kvstore='dist_sync_p3')"
        " or mx.kv.create('dist_sync_p3').\n"
        "    A gluon.Trainer creates its store in its first step, so a script without a step"
        " has none. For MXNet's own stores use `p3 launch --native`.",
        file=sys.stderr,
    )
    return Outcome(1, "the script never created a p3 store, so each worker trained alone")


class _Report:
    """Tells `p3 launch` of a failure before the other processes hear of it.

    Their failures follow from ours, and may reach the launcher sooner.
    """

    def __init__(self, descriptor: Optional[int]) -> None:
        self._descriptor, self._owner = descriptor, os.getpid()
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.failure(1)

    def forked(self) -> bool:
        """Whether this is a child that the script forked, and so no part of the job."""
        return os.getpid() != self._owner

    def failure(self, code: int) -> int:
        """Report the exit code if it means failure; return it."""
        if code != 0 and self._descriptor is not None and not self.forked():
            with contextlib.suppress(OSError):
                os.write(self._descriptor, b"%d\n" % self._owner)
            self._descriptor = None
        return code


def _raise_on_sigterm() -> None:
    """Turn SIGTERM into ``SystemExit``, so that the job hears of this worker's end.

    In forked children it does what it does without p3, from their first moment on: it is
    blocked during the fork, as Python forgets a signal that comes before it has got going.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def terminate(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)  # a second one does not wait
        raise scripts.Terminated(128 + signum)

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    block, unblock = (
        functools.partial(signal.pthread_sigmask, how, [signal.SIGTERM])
        for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)
    signal.signal(signal.SIGTERM, terminate)


def _join_threads() -> None:
    """Wait for the script's threads, as Python does before it exits."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
