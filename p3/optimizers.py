"""What p3 knows about MXNet's optimizers on the caller's side: which, and what has changed.

The servers apply the caller's optimizer.  It is sent once, as a pickle; what a script changes
on its own object afterwards (learning rate, weight decay, ``rescale_grad``, multipliers) is
found here, by comparing before each push, and travels with the push.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, Dict

from p3.errors import UsageError

#: optimizers of MXNet that treat every element by itself, so slices may be updated apart
ELEMENTWISE = frozenset(
    (
        "SGD NAG Adam AdaGrad AdaDelta RMSProp Ftrl FTML Signum Adamax DCASGD SGLD Nadam ccSGD"
        " NDabs Test"
    ).split()
)
#: attributes that count updates: each shard keeps its own
_COUNTERS = frozenset(("num_update", "begin_num_update", "aggregate_num"))
_PLAIN = (bool, int, float, type(None))


def needs_whole_keys(optimizer: Any) -> bool:
    """Whether ``optimizer`` looks at a parameter in one piece (norms, rows) or may do so."""
    kind = type(optimizer)
    return kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("mxnet.")


def dump(optimizer: Any) -> bytes:
    """The optimizer as a pickle; raises ``UsageError`` if it cannot be one."""
    try:
        return pickle.dumps(optimizer, protocol=4)
    except Exception as error:
        raise UsageError(
            f"set_optimizer: {type(optimizer).__name__} cannot be sent to the servers: {error}."
            " It must be picklable: no lambdas or local functions, in its scheduler either"
        ) from error


class Changes:
    """The plain attributes of the caller's optimizer, as each key's servers last saw them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._base = self._plain()
        self._seen: Dict[Any, Dict[str, Any]] = {}  # key -> what its last push said

    def since_last_push(self, key: Any) -> bytes:
        """JSON of what changed since ``key``'s last push; empty if nothing did."""
        now = self._plain()
        parameter = self._optimizer.param_dict.get(key)
        if parameter is not None:
            now["multipliers"] = [float(parameter.lr_mult), float(parameter.wd_mult)]
        seen = self._seen.get(key)
        if seen == now:
            return b""
        before: Dict[str, Any] = self._base if seen is None else seen
        self._seen[key] = now
        changed = {name: v for name, v in now.items() if name not in before or before[name] != v}
        # a first push always speaks, so that the servers look up the key's multipliers
        return json.dumps(changed).encode() if changed or seen is None else b""

    def _plain(self) -> Dict[str, Any]:
        return {
            name: value
            for name, value in self._optimizer.__dict__.items()
            if isinstance(value, _PLAIN) and name not in _COUNTERS
        }
