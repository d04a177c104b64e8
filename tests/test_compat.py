"""What is put back for MXNet 1.9.1, and what is said when that cannot be enough."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

from p3 import compat

ROOT = Path(__file__).resolve().parent.parent
WATCHDOG_S = 120


def fake_numpy(monkeypatch: pytest.MonkeyPatch, version: str) -> types.ModuleType:
    numpy = types.ModuleType("numpy")
    numpy.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    return numpy


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Nobody finds these modules any more."""
    found = importlib.util.find_spec

    def find_spec(name: str, package: object = None) -> object:
        return None if name in names else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=WATCHDOG_S,
        check=False,
    )
    output = ran.stdout.decode()
    assert ran.returncode == 0, output
    return output


def test_importing_it_loads_neither_mxnet_nor_zmq_nor_numpy():
    output = python(
        "import sys\nimport p3.compat\n"
        "print(sorted({'mxnet', 'zmq', 'numpy', 'setuptools'} & set(sys.modules)))"
    )
    assert output == "[]\n"


def test_mxnet_imports_and_nothing_is_said_about_it():
    output = python(
        "from p3 import compat\n"
        "compat.require_mxnet(); compat.prepare(); compat.prepare()\n"
        "import mxnet\n"
        "assert mxnet.nd.ones(3).sum().asscalar() == 3\n"
        "import mxnet.test_utils, numpy\n"
        "assert numpy.dtype(numpy.bool) == bool and numpy.dtype(numpy.int).kind == 'i'"
    )
    assert output == ""


def test_the_aliases_come_back_and_nothing_is_overwritten(monkeypatch):
    numpy = fake_numpy(monkeypatch, "1.26.4")
    numpy.int = "kept"
    compat.prepare()
    compat.prepare()
    assert numpy.bool is bool
    assert numpy.int == "kept"


@pytest.mark.parametrize("version", ["2.0.0", "2.1.0rc1", "10.0"])
def test_numpy_2_is_refused_in_one_sentence(monkeypatch, version):
    numpy = fake_numpy(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"numpy {version}: pip install 'numpy<2'") as caught:
        compat.prepare()
    assert "\n" not in str(caught.value)
    assert not hasattr(numpy, "bool")


def test_without_distutils_setuptools_brings_it(monkeypatch):
    hide(monkeypatch, "distutils")
    monkeypatch.setitem(sys.modules, "setuptools", types.ModuleType("setuptools"))
    compat.prepare()


def test_without_distutils_and_setuptools_it_says_what_to_install(monkeypatch):
    hide(monkeypatch, "distutils")
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(ImportError, match="pip install setuptools"):
        compat.prepare()


def test_without_mxnet_it_says_what_to_install(monkeypatch):
    hide(monkeypatch, "mxnet")
    with pytest.raises(ImportError, match=r"p3-kvstore\[mxnet\].*GPU") as caught:
        compat.require_mxnet()
    assert caught.value.name == "mxnet"
    assert "\n" not in str(caught.value)


def test_a_folder_that_happens_to_be_called_mxnet_is_no_mxnet(tmp_path):
    (tmp_path / "mxnet").mkdir()
    output = python(
        "import sys\nfrom p3 import compat\n"
        f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(tmp_path)!r}]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'p3' not in type(f).__module__]\n"
        "try: compat.require_mxnet()\n"
        "except ImportError as error: print(error)\n"
        "else: print('taken for MXNet')"
    )
    assert "pip install 'p3-kvstore[mxnet]'" in output


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("libgomp.so.1", "sudo apt-get install .*libgomp1"),
        ("libquadmath.so.0", "sudo apt-get install .*libquadmath0"),
        ("libstdc++.so.6", r"sudo apt-get install .*libstdc\+\+6"),
        ("libcudart.so.11.0", "CUDA"),
        ("libcuda.so.1", "NVIDIA driver"),
        ("libopenblas64_.so.0", "install the package of your system"),
    ],
)
def test_a_missing_system_library_is_named_with_its_package(library, advice):
    loader = f"{library}: cannot open shared object file: No such file or directory"
    with pytest.raises(ImportError, match=advice) as caught, compat.explained():
        raise OSError(loader)
    assert library in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), ModuleNotFoundError("x"), OSError("broken")]
)
def test_other_failures_of_an_import_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, compat.explained():
        raise error
    assert caught.value is error
