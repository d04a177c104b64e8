"""The names of p3's stores, and how MXNet comes to know them.

MXNet looks for a name in ``KVStoreBase.kv_registry`` before its native stores, and what it
knows nowhere becomes a native local store, or no store at all on a single device: a typing
error then trains every worker alone, silently.  So ``register`` also puts a check before
MXNet's two entrances, ``mx.kvstore.create`` and ``mxnet.model._create_kvstore``.

Nothing here imports MXNet before ``register`` is called, or ``p3.store`` before a store is
created.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from p3 import config, errors, mending
from p3.errors import UsageError
from p3.mending import wrap

if TYPE_CHECKING:
    from p3.store import P3KVStore

#: name of a store -> its ``type``, of which MXNet reads ``dist``, ``_sync`` and ``_async``
STORES: Dict[str, str] = {
    "dist_sync_p3": "dist_sync_p3",
    "dist_device_sync_p3": "dist_device_sync_p3",
    "dist_async_p3": "dist_async_p3",
    "p3": "dist_sync_p3",
    "dist_p3": "dist_sync_p3",
}

#: native stores that p3's take the place of where that is asked for (P3_REPLACE_NATIVE), and
#: their ``type``: the name, as scripts compare it; but Module does not take ``dist`` for ``_sync``
REPLACED: Dict[str, str] = {
    "dist": "dist_sync",
    "dist_sync": "dist_sync",
    "dist_device_sync": "dist_device_sync",
    "dist_sync_device": "dist_sync_device",
    "dist_async": "dist_async",
    "dist_device_async": "dist_device_async",
    "dist_async_device": "dist_async_device",
}

#: MXNet's own, as its documentation and examples write them, for suggestions
NATIVE = ("local", "device", "nccl", "dist_sync", "dist_device_sync", "dist_async")

#: MXNet tells native stores by what their names contain: the words they are made of
_KINDS = frozenset(("local", "device", "nccl", "dist", "horovod", "byteps"))
_WORDS = _KINDS | {"sync", "async", "update", "allreduce", "cpu"}

_forbidden: Optional[str] = None  # why this process may have none of p3's stores


def register() -> None:
    """Make p3's stores known to MXNet, mend it for them, refuse misspelt names.  Idempotent."""
    import mxnet

    registry = mxnet.kvstore.KVStoreBase.kv_registry
    stores = {**STORES, **REPLACED} if config.replacing_native() else STORES
    for name, kind in stores.items():
        registry[name] = functools.partial(_create, name, kind)
    errors.count_as(mxnet.base.MXNetError)
    wrap(mxnet.kvstore, "create", _checked_create)
    wrap(mxnet.model, "_create_kvstore", _checked_create_kvstore)
    mending.install()


def forbid(reason: str) -> None:
    """From now on creating one of p3's stores raises ``UsageError(reason)``."""
    global _forbidden
    _forbidden = reason


def check(name: str) -> None:
    """Raise ``UsageError`` if ``name`` is no store, or one that cannot work in this job."""
    name = name.lower()
    if name in STORES or name in _registered():
        return
    if not _is_native(name):
        raise UsageError(_unknown(name))
    if "dist" in name and config.under_launcher():
        raise UsageError(
            f"kvstore {name!r} is MXNet's own distributed store, but this process was started by"
            " p3's launcher, which runs p3's servers and not MXNet's."
            f" Use {_instead_of(name)!r}, or start the job with `--replace`"
            " (P3_REPLACE_NATIVE=1), which has p3 take the name over, or with"
            " `p3 launch --native`, for MXNet's own."
        )


def _create(name: str, kind: str) -> P3KVStore:
    if _forbidden is not None:
        raise UsageError(f"kvstore {name!r}: {_forbidden}")
    from p3.store import P3KVStore

    return P3KVStore(kind)


def _is_native(name: str) -> bool:
    words = name.split("_")
    return all(word in _WORDS for word in words) and any(word in _KINDS for word in words)


def _instead_of(name: str) -> str:
    """The store of p3's that does what the native ``name`` says."""
    if "async" in name:
        return "dist_async_p3"
    return "dist_device_sync_p3" if "device" in name else "dist_sync_p3"


def _registered() -> List[str]:
    import mxnet

    return list(mxnet.kvstore.KVStoreBase.kv_registry)


def _unknown(name: str) -> str:
    known = [*STORES, *NATIVE, *(other for other in _registered() if other not in STORES)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"kvstore {name!r} is unknown{hint}: p3's stores are {', '.join(STORES)};"
        f" MXNet's own are {', '.join(NATIVE)}"
    )


def _checked_create(original: Callable[..., Any], name: Any = "local") -> Any:
    if isinstance(name, str):
        check(name)
    return original(name)


def _checked_create_kvstore(
    original: Callable[..., Any], kvstore: Any, num_device: int, arg_params: Any
) -> Any:
    """On one device MXNet creates no store for a name without ``dist`` in lower case."""
    if isinstance(kvstore, str):
        check(kvstore)
        kvstore = STORES.get(kvstore.lower(), kvstore)
    return original(kvstore, num_device, arg_params)
