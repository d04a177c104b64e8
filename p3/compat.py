"""What lets MXNet 1.9.1 import where its authors never tried it.  Loads neither mxnet nor zmq.

MXNet 1.9.1 names ``numpy.bool`` (on import) and ``numpy.int`` (in ``mxnet.test_utils``), which
numpy 1.24 dropped, and ``distutils``, which Python 3.12 dropped.  ``prepare()`` puts them back:

    Python 3.8 to 3.11   numpy 1.17 to 1.26
    Python 3.12          numpy 1.26, with setuptools, whose copy of distutils takes over

numpy 2 cannot be helped: MXNet uses too much of what it removed.

Every function here may be called again and from any thread; the failures are ``ImportError``
in one sentence that says what to install.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from typing import Iterator

#: what MXNet calls it: what it was until numpy 1.24
_ALIASES = {"bool": bool, "int": int}

#: what MXNet's wheel takes from the system, and the Debian and Ubuntu packages that hold it
_LIBRARIES = ("libgomp.so.1", "libquadmath.so.0", "libstdc++.so.6")
_PACKAGES = "libgomp1 libquadmath0 libstdc++6"

_NO_LIBRARY = re.compile(r"(?P<name>lib\S+?\.so[.\d]*): cannot open shared object file")


def prepare() -> None:
    """Make ``import mxnet`` work under this Python and numpy; call it before that import.

    Raises ``ImportError`` if numpy is missing or is numpy 2, and if Python has no ``distutils``
    and setuptools is not there to bring it.
    """
    _restore_numpy_aliases()
    if importlib.util.find_spec("distutils") is None:
        _import_distutils()


def require_mxnet() -> None:
    """Raise ``ImportError``, saying what to install, unless an MXNet is installed.

    MXNet is looked for and not loaded, so this takes no time.
    """
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:  # no origin: a folder that happens to be called so
        raise ImportError(
            "p3 needs MXNet 1.9.1, which is not installed: pip install 'p3-kvstore[mxnet]' for "
            "the CPU build, or the GPU build that matches your CUDA (such as mxnet-cu112)",
            name="mxnet",
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside this, an ``import mxnet`` that fails for want of a system library says which.

    The loader's ``OSError`` becomes an ``ImportError`` naming the package to install.
    Everything else passes as it is.
    """
    try:
        yield
    except OSError as error:
        missing = _NO_LIBRARY.search(str(error))
        if missing is None:
            raise
        raise ImportError(_advice(missing["name"]), name="mxnet") from error


def _advice(library: str) -> str:
    """One sentence about a shared library that the loader did not find."""
    if library in _LIBRARIES:
        how = f"sudo apt-get install {_PACKAGES}"
    elif library.startswith(("libcu", "libnccl", "libnv")):
        how = "install the NVIDIA driver and the CUDA release of your MXNet build, or a CPU build"
    else:
        how = "install the package of your system that holds it"
    return f"MXNet needs the system library {library}, which is not there: {how}"


def _restore_numpy_aliases() -> None:
    import numpy  # here, not above: `p3 launch` and `p3 --help` have no use for it

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ImportError(
            f"MXNet 1.9.1 cannot run on numpy {numpy.__version__}: pip install 'numpy<2'",
            name="numpy",
        )
    for name, meaning in _ALIASES.items():
        # Not hasattr: numpy's module __getattr__ would warn about the very name.
        if name not in vars(numpy):
            setattr(numpy, name, meaning)


def _import_distutils() -> None:
    try:
        importlib.import_module("setuptools")
    except ImportError:
        raise ImportError(
            "MXNet 1.9.1 imports distutils, which this Python no longer has: "
            "pip install setuptools, which brings it",
            name="distutils",
        ) from None
