"""Who may import what: the pure modules neither MXNet nor ZeroMQ, and who names either at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import p3

PACKAGE = Path(p3.__file__).parent
PURE = """
    p3 p3.config p3.errors p3.slicing p3.priority p3.credit p3.wire p3.rounds p3.optimizers
    p3.forward_order p3.compression p3.rows p3.server p3.server.shard p3.server.sgd
    p3.server.unpickle p3.scheduler p3.scheduler.state p3.scheduler.placement p3.transport
    p3.transport.interface p3.transport.inproc p3.exchange p3.worker p3.control p3.node p3.testing
    p3.mending p3.mending.names p3.mending.stores p3.mending.stale p3.mending.trainer
    p3.mending.module
""".split()
MAY_NAME_MXNET = {
    "store.py",  # the store is one of MXNet's
    "engine.py",  # joins its engine
    "arguments.py",  # checks and copies its arrays
    "operations.py",  # knows its errors
    "refused.py",  # has what the store takes over from MXNet's
    "states.py",  # makes arrays of its updaters' states
    "sparse.py",  # takes its row-sparse arrays apart
    "ndarray.py",  # looks into its arrays
    "server/updater.py",  # applies its optimizers
    "compat.py",  # prepares its import
    "_hook.py",  # waits for its import
    "naming.py",  # registers the stores with it
    "mending/__init__.py",  # wraps its Trainer and Module
    "mending/agreement.py",  # asks the other ranks through a store
    "launch/run.py",  # has it serve in a job of its own stores
    "testing.py",  # imports it in the workers it starts
}


def imports(path):
    """Names of all modules that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def importers(library):
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == library for name in imports(path))
    }


IMPORT_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if {"mxnet", "zmq"} & set(sys.modules):
        sys.exit(f"{module} loads MXNet or ZeroMQ")
"""


def test_importing_a_pure_module_loads_neither_mxnet_nor_zmq():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *PURE], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_only_the_transport_imports_zmq():
    assert importers("zmq")
    assert all(path.startswith("transport/") for path in importers("zmq"))


def test_only_those_who_must_import_mxnet():
    assert importers("mxnet") <= MAY_NAME_MXNET


def test_only_config_reads_the_environment():
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers == {"config.py"}
