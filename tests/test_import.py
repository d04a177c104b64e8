"""What `import p3` does and does not do; each case in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = "[m for m in ('mxnet', 'zmq', 'numpy') if m in sys.modules]"


def python(code, *options, **env):
    """Run ``code``; return the finished process, its output as text."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def check(code, *options, **env):
    done = python(code, *options, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_mxnet_nor_zmq_nor_numpy():
    assert check(f"import sys, p3; print({HEAVY})") == "[]"


def test_nor_do_the_pure_modules_and_the_launcher():
    names = "config errors slicing priority credit rounds wire naming compat server.shard"
    names += " scheduler.state launch.run launch.local"
    modules = ", ".join(f"p3.{name}" for name in names.split())
    assert check(f"import sys, {modules}; print({HEAVY})") in ("[]", "['numpy']")


def test_import_neither_serves_nor_changes_the_environment():
    code = """
import os, threading
before = dict(os.environ)
import p3
assert dict(os.environ) == before and threading.active_count() == 1
print(p3.__version__)
"""
    assert check(code, DMLC_ROLE="server") == "0.1.0"


@pytest.mark.parametrize("order", ["p3, mxnet", "mxnet, p3", "p3.naming, mxnet", "p3.store"])
def test_the_stores_are_registered_whatever_comes_first(order):
    code = f"""
import warnings
warnings.simplefilter("ignore")
import {order}
import mxnet
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import p3._hook, p3.naming
    p3._hook.install()
    p3.naming.register()
registry = mxnet.kvstore.KVStoreBase.kv_registry
print(*(name for name in registry if name != "teststore"))
"""
    assert check(code).split() == [
        "dist_sync_p3",
        "dist_device_sync_p3",
        "dist_async_p3",
        "p3",
        "dist_p3",
    ]


def test_mxnet_is_loaded_by_its_own_loader():
    code = """
import p3, mxnet, importlib.machinery, pkgutil
assert type(mxnet.__loader__) is type(mxnet.__spec__.loader) is importlib.machinery.SourceFileLoader
assert b"MXNet" in pkgutil.get_data("mxnet", "__init__.py")
"""
    check(code)


def test_only_one_finder_is_installed():
    code = """
import sys, importlib, p3
importlib.reload(p3)
print(sum(type(finder).__module__ == "p3._hook" for finder in sys.meta_path))
"""
    assert check(code) == "1"


def test_without_mxnet_it_says_what_to_install():
    for code in ("import p3", "from p3.__main__ import main"):
        done = python(code, "-S")  # without site-packages
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and last.startswith("ImportError: p3 needs MXNet")
        assert "p3-kvstore[mxnet]" in last


def test_a_folder_called_mxnet_is_not_mxnet(tmp_path):
    (tmp_path / "mxnet").mkdir()
    done = python("import p3", "-S", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert "ImportError: p3 needs MXNet" in done.stderr
