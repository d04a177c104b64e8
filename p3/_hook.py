"""Registers p3's stores at the moment MXNet is imported, without importing it.

A finder at the head of ``sys.meta_path`` lets the other finders look for ``mxnet`` and wraps
the loader they give: ``p3.compat.prepare()`` before the module runs, ``p3.naming.register()``
after.  No other import is touched.  Python's import lock makes all of it thread safe.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Optional, Sequence

from p3 import compat

MODULE = "mxnet"


def install() -> None:
    """Register the stores now if MXNet is there, else when it comes.  Idempotent.

    Raises ``ImportError`` if no MXNet is installed.
    """
    if MODULE in sys.modules:
        _register()
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    compat.require_mxnet()
    sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from p3 import naming  # only now: it needs MXNet

    naming.register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``mxnet`` as the others would, and wraps its loader."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != MODULE:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads ``mxnet`` by its own loader, between p3's two steps."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_data, get_source, ... as ever

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[types.ModuleType]:
        module: Optional[types.ModuleType] = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        compat.prepare()
        module.__loader__ = self._loader  # from here on nobody need know of the wrapper
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with compat.explained():
            self._loader.exec_module(module)
        _register()
