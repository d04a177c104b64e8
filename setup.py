"""The distribution ``p3-kvstore``.  Settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def text(name):
    """What a file of this folder holds; nothing if it is not there."""
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def version():
    """``__version__`` of the package, read and not imported: numpy may not be installed yet."""
    found = re.search(r"^__version__ = [\"'](.+?)[\"']", text("p3/__init__.py"), re.MULTILINE)
    return found.group(1) if found else "0"


# MXNet is an extra: its GPU builds (mxnet-cu112, ...) are distributions of their own that bring
# the same module, and a requirement of `mxnet` would install the CPU build over them.
MXNET = ["mxnet==1.9.1"]
EXAMPLES = ["scikit-learn"]
TEST = ["pytest>=7", *EXAMPLES]
LINT = ["ruff==0.17.*", "mypy>=1.14"]  # each ruff has a form of its own

setup(
    name="p3-kvstore",
    version=version(),
    description="Priority-based parameter propagation as a KVStore for Apache MXNet",
    long_description=text("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["mxnet", "kvstore", "distributed training", "parameter server", "p3"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["p3", "p3.*"]),
    package_data={"p3": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.8,<3.13",
    install_requires=[
        "numpy>=1.17,<2",  # 1.24 and later through p3/compat.py; MXNet cannot run on 2
        "pyzmq>=22",
        "setuptools; python_version >= '3.12'",  # brings distutils, which MXNet imports
    ],
    extras_require={
        "mxnet": MXNET,
        "examples": EXAMPLES,
        "test": TEST,
        "lint": LINT,
    },
    entry_points={"console_scripts": ["p3 = p3.__main__:main"]},
)
