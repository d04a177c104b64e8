"""Load an optimizer, or its states, from the network or a file: only classes on an allow-list.

Allowed are MXNet's optimizers, schedulers and arrays, NumPy's plain values and Python's containers;
further modules by the setting ``P3_ALLOW_OPTIMIZERS``.  A pickle can name any callable, so
nothing is looked up that is not on the list (Python's manual, "pickle: restricting globals").
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Iterable

from p3.errors import UsageError

_MODULES = ("mxnet.optimizer", "mxnet.lr_scheduler")
_NAMES = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("copyreg", "_reconstructor"),
    ("builtins", "object"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
    ("builtins", "bytearray"),
    ("mxnet.ndarray.ndarray", "NDArray"),
    ("mxnet.ndarray.sparse", "RowSparseNDArray"),
    ("mxnet.numpy.multiarray", "ndarray"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allowed: Iterable[str]) -> None:
        super().__init__(file)
        self._modules = (*_MODULES, *allowed)

    def find_class(self, module: str, name: str) -> Any:
        known = any(module == top or module.startswith(top + ".") for top in self._modules)
        if (known and "." not in name) or (module, name) in _NAMES:
            found = super().find_class(module, name)
            if (module, name) in _NAMES or isinstance(found, type):
                return found
        raise UsageError(
            f"the optimizer needs {module}.{name}, which p3's servers do not load. Put it in a"
            f" module that the servers can import, and allow that module on every process:"
            f" P3_ALLOW_OPTIMIZERS={module if module != '__main__' else 'my_module'}"
        )


def loads(pickled: bytes, allowed: Iterable[str] = ()) -> Any:
    """The object; raises ``UsageError`` naming what is not allowed and the setting for it."""
    try:
        return _Unpickler(io.BytesIO(pickled), allowed).load()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the optimizer cannot be loaded: {error}") from error
