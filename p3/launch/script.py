"""What ``p3 launch`` and ``p3 run`` are to run, given and run as Python itself would.

    SCRIPT ARGS...            a file, or a directory or zip archive with a __main__.py
    -m package.module ARGS... a module
    -- SCRIPT ARGS...         the same as without, for a script whose name starts with a dash

Arguments after the script are its own, whatever they look like.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Tuple

from p3.errors import UsageError


class Script(NamedTuple):
    """A script or module and its arguments."""

    target: str
    args: List[str]
    is_module: bool = False

    def command(self) -> List[str]:
        """The arguments that tell Python (or ``p3 run``) to run it."""
        if self.is_module:
            return ["-m", self.target, *self.args]
        return (["--"] if self.target.startswith("-") else []) + [self.target, *self.args]


class Outcome(NamedTuple):
    """How a script ended: the exit code Python would have, and why if that is not 0."""

    code: int
    reason: Optional[str] = None


class Terminated(SystemExit):
    """Raised in the script by SIGTERM."""


def split(argv: List[str], valued: Collection[str] = ()) -> Tuple[List[str], Optional[Script]]:
    """Part the options before the script from the script and its arguments.

    ``valued`` are the options whose value is the next argument.
    """
    at = 0
    while at < len(argv):
        arg, rest = argv[at], argv[at + 1 :]
        if arg == "--" and rest:
            return argv[:at], Script(rest[0], rest[1:])
        if arg.startswith("-m"):
            words = [arg[2:], *rest] if arg != "-m" else rest
            if not words:
                raise UsageError("-m needs the name of a module")
            return argv[:at], Script(words[0], words[1:], is_module=True)
        if not arg.startswith("-") or arg == "-":
            return argv[:at], Script(arg, rest)
        at += 2 if arg in valued else 1
    return argv, None


def add_stores(parser: argparse.ArgumentParser, native: str) -> None:
    """The options for who serves MXNet's names of stores; ``native``: the help for --native."""
    stores = parser.add_mutually_exclusive_group()
    stores.add_argument(
        "--replace",
        action="store_true",
        help="p3 takes over dist_sync, dist_device_sync and dist_async (P3_REPLACE_NATIVE=1)",
    )
    stores.add_argument("--native", action="store_true", help=native)


def set_path(script: Script) -> None:
    """Make ``sys.path[0]`` what it is when Python runs the script, instead of the command's."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return  # then Python puts nothing there, for the command or the script
    if script.is_module:
        sys.path[0] = os.getcwd()
    else:
        path = os.path.realpath(script.target)
        sys.path[0] = path if _holds_main(path) else os.path.dirname(path)


def execute(script: Script) -> Outcome:
    """Run the script as ``__main__``, and see to its exception as Python does.

    The module stays in ``sys.modules`` as ``__main__``, so that what the script defines can
    be pickled afterwards too, and multiprocessing finds it in a spawned child.
    """
    try:
        _run(script)
    except SystemExit as error:
        return _outcome(error)
    except KeyboardInterrupt as error:
        _show(error)
        return Outcome(130, "interrupted (SIGINT)")
    except BaseException as error:  # noqa: BLE001 - the script's failure is what we return
        _show(error)
        return Outcome(1, f"{type(error).__name__}: {error}")
    return Outcome(0)


def _run(script: Script) -> None:
    if script.is_module:
        _run_module(script)
    elif _holds_main(script.target) or script.target.endswith(".pyc"):
        sys.argv[:] = [script.target, *script.args]
        runpy.run_path(script.target, run_name="__main__")
    else:
        _run_source(script)


def _run_source(script: Script) -> None:
    path = os.path.abspath(script.target)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"p3 run: can't open file {path!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[:] = [script.target, *script.args]
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _new_main(
        __file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None
    )
    exec(compile(source, path, "exec", dont_inherit=True), main)


def _run_module(script: Script) -> None:
    sys.argv[:] = ["-m", *script.args]
    spec = _find(script.target)
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    sys.argv[0] = str(spec.origin)
    main = _new_main(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    exec(code, main)


def _find(name: str) -> importlib.machinery.ModuleSpec:
    """The spec of the module, or of ``__main__`` in it if it is a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # not the module itself, but something its package imports
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        print(f"p3 run: no module named {name!r} that can be run", file=sys.stderr)
        raise SystemExit(1)
    return spec


def _new_main(**attributes: Any) -> Dict[str, Any]:
    """A fresh ``__main__``; return its namespace."""
    module = types.ModuleType("__main__")
    vars(module).update(attributes, __builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    return vars(module)


def _holds_main(path: str) -> bool:
    """Whether it is a directory or zip archive, of which Python runs the __main__.py."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _outcome(error: SystemExit) -> Outcome:
    if error.code is None or error.code == 0:
        return Outcome(0)
    if isinstance(error, Terminated):
        return Outcome(int(error.code or 0), "ended by SIGTERM")
    if isinstance(error.code, int):
        return Outcome(error.code & 0xFF, f"sys.exit({error.code})")
    print(error.code, file=sys.stderr)
    return Outcome(1, f"sys.exit({str(error.code)!r})")


def _show(error: BaseException) -> None:
    """Print the traceback, without the frames of this file, by the hook the script has set."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
