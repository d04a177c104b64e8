"""Whose store it is: p3's or not, and which Trainer's or Module's."""

from __future__ import annotations

import sys
import weakref
from typing import Any

_taken: weakref.WeakSet[Any] = weakref.WeakSet()  # stores that a Trainer or a Module has used


def is_p3(store: Any) -> bool:
    """Whether ``store`` is one of p3's; loads nothing."""
    module = sys.modules.get("p3.store")
    return module is not None and isinstance(store, module.P3KVStore)


def own(store: Any) -> Any:
    """A store like ``store`` that no other Trainer or Module has used: itself, the first time.

    Anything but one of p3's stores is returned as it is.  A store once used is never given
    again, even if its user is gone, for Python frees objects at a different time on each rank.
    """
    if not is_p3(store):
        return store
    if store in _taken:
        store = store.sibling()
    _taken.add(store)
    return store
