"""What is installed, and what the set-up says on a machine that lacks something."""

from __future__ import annotations

import os
import re
import shutil
import sys
from email.parser import Parser
from pathlib import Path
from typing import Dict

import pytest
from commands import ROOT
from commands import run_merged as run

import p3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what setup.py would install (lib) and say of itself (*.egg-info)."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("built")
    setup = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    base, lib = str(folder / "base"), str(folder / "lib")
    ran = run([*setup, "build", "--build-base", base, "--build-lib", lib], cwd=str(ROOT))
    assert ran.returncode == 0, ran.stdout
    return folder


def test_every_module_and_the_type_marker_are_installed(built: Path) -> None:
    source = {path.relative_to(ROOT) for path in (ROOT / "p3").rglob("*.py")}
    lib = built / "lib"
    installed = {path.relative_to(lib) for path in lib.rglob("*") if path.is_file()}
    assert installed == source | {Path("p3/py.typed")}


def test_the_metadata_says_who_it_is_and_where_it_runs(built: Path) -> None:
    info = Parser().parsestr((built / "p3_kvstore.egg-info" / "PKG-INFO").read_text("utf-8"))
    assert (info["Name"], info["Version"]) == ("p3-kvstore", p3.__version__)
    assert set(info["Requires-Python"].split(",")) == {">=3.8", "<3.13"}
    assert {"mxnet", "examples", "test", "lint"} <= set(info.get_all("Provides-Extra"))
    scripts = (built / "p3_kvstore.egg-info" / "entry_points.txt").read_text()
    assert "p3 = p3.__main__:main" in scripts


def test_mxnet_is_an_extra_only(built: Path) -> None:
    lines = (built / "p3_kvstore.egg-info" / "requires.txt").read_text()
    needed, *extras = re.split(r"^\[", lines, flags=re.MULTILINE)
    assert "mxnet" not in needed
    assert {"numpy<2,>=1.17", "pyzmq>=22"} <= set(needed.split())
    assert "mxnet]\nmxnet==1.9.1" in "\n".join(extras)


def tree(folder: Path) -> Path:
    """A copy of what the set-up needs."""
    for name in ("setup.py", "Makefile", ".ci/bootstrap", ".ci/run"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(str(ROOT / name), str(folder / name))
    return folder


def machine(folder: Path, commands: Dict[str, str]) -> Dict[str, str]:
    """The environment of a machine that has these commands and hardly any other."""
    bin_ = folder / "bin"
    bin_.mkdir()
    for name in ("sh", "bash", "cat", "cksum", "dirname", "mkdir", "grep", "tail", "tee", "rm"):
        (bin_ / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (bin_ / "mktemp").symlink_to(shutil.which("mktemp") or "/bin/mktemp")
    for name, script in {"id": "echo 1000", **commands}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_ / name).chmod(0o755)
    return {"PATH": str(bin_)}


#: pretends to be Python 3.11 without the things that $1 would fail on
LIKE_PYTHON = 'case "$2" in *version_info*) echo {version};; *{lacks}*) exit 1;; esac'


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({}, "needs a Python from 3.8 to 3.12, and this machine has no python3"),
        (
            {"python3": "echo 3.13.1", "python3.8": "exit 127"},
            "needs a Python from 3.8 to 3.12, and this machine has python3 (3.13.1)",
        ),
        ({"python3": "echo 3.7.16"}, "and this machine has python3 (3.7.16)"),
        (
            {"python3": LIKE_PYTHON.format(version="3.11.2", lacks="ensurepip")},
            "this machine lacks python3.11-venv: sudo apt-get install python3.11-venv",
        ),
        (
            {"python3.10": LIKE_PYTHON.format(version="3.10.6", lacks="ctypes")},
            "sudo apt-get install libgomp1 libquadmath0 libstdc++6",
        ),
    ],
)
def test_what_is_lacking_is_said_in_one_sentence(
    tmp_path: Path, commands: Dict[str, str], said: str
) -> None:
    folder = tree(tmp_path)
    env = machine(tmp_path, commands)
    ran = run(["sh", str(folder / ".ci" / "bootstrap")], env=env)
    assert ran.returncode == 1
    assert said in ran.stdout
    assert ran.stdout.startswith("p3: ") and ran.stdout.count("\n") == 1, ran.stdout
    assert not (folder / ".venv").exists()


def test_a_python_without_venv_is_passed_over_for_one_that_has_it(tmp_path: Path) -> None:
    folder = tree(tmp_path)
    commands = {
        "python3": LIKE_PYTHON.format(version="3.12.3", lacks="ensurepip"),
        "python3.9": 'case "$2" in *version_info*) echo 3.9.2;; venv) exit 1;; esac',
    }
    ran = run(["sh", str(folder / ".ci" / "bootstrap")], env=machine(tmp_path, commands))
    assert "making .venv with python3.9 (3.9.2)" in ran.stdout


@pytest.mark.parametrize(
    ("lint", "test", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 1)], ids=["good", "lint", "test"]
)
def test_ci_ends_with_the_closing_line_and_fails_with_either(
    tmp_path: Path, lint: int, test: int, code: int
) -> None:
    closing = "===== 3 passed, 1 skipped in 2.50s ====="
    make = f'case $1 in lint) exit {lint};; test) echo "{closing}"; echo more; exit {test};; esac'
    folder = tree(tmp_path)
    ran = run(["bash", str(folder / ".ci" / "run")], env=machine(tmp_path, {"make": make}))
    assert ran.returncode == code
    assert ran.stdout.splitlines()[-1] == closing


def test_make_alone_lists_the_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ran = run(["make", "-C", str(ROOT), "--no-print-directory"], env=env)
    assert ran.returncode == 0
    targets = re.findall(r"make (\w+)", ran.stdout)
    assert {"test", "lint", "demo", "clean", "help"} <= set(targets)
