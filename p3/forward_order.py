"""Find the order in which the forward pass uses the keys, from when their gradients are ready.

A Trainer numbers parameters by name, and ``conv10`` comes before ``conv2``; a wrong order
costs most of what priorities gain.  But gradients become ready in the reverse of the forward
order, so the order can be seen.  Keys that become ready together (a hybridized net runs its
operators in bulks) keep the order that the caller's priorities give them.

Rank 0 observes, and all ranks use what it found once three steps in a row agree: then
``observe`` returns the keys, most urgent first, and is done.  If every gradient is ready at
once, nothing is found that the caller's priorities do not say.  Pure: time is passed in.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np

#: gradients that follow each other this closely count as ready together
_TOGETHER_S = 0.001
_STEPS = 3
_AGREEMENT = 0.95


class ForwardOrder:
    """The observations of one store's pushes.  Owned by one thread."""

    def __init__(self) -> None:
        self._step = 0
        self._ready: List[Tuple[float, int, Any]] = []  # of this step: time, priority, key
        self._orders: List[List[Any]] = []  # of the last steps that agreed
        self._done = False

    def observe(self, key: Any, step: int, priority: int, now: float) -> Optional[List[Any]]:
        """A gradient is ready; the forward order, once, when it is certain."""
        if self._done or step < self._step:
            return None
        found = None
        if step > self._step:
            found = self._conclude()
            self._step, self._ready = step, []
        self._ready.append((now, priority, key))
        return found

    def _conclude(self) -> Optional[List[Any]]:
        """The step is over: compare it with the ones before."""
        order = forward(self._ready)
        if self._orders and not _agree(self._orders[-1], order):
            self._orders = []
        self._orders.append(order)
        if len(self._orders) < _STEPS or len(order) < 2:
            return None
        self._done = True
        self._orders = []
        return order


def forward(ready: List[Tuple[float, int, Any]]) -> List[Any]:
    """Keys in forward order, from ``(time in s, caller's priority, key)`` in any order."""
    groups: List[List[Tuple[float, int, Any]]] = []
    for entry in sorted(ready, key=lambda entry: entry[0]):
        if groups and entry[0] - groups[-1][-1][0] < _TOGETHER_S:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    ordered: List[Any] = []
    for group in reversed(groups):
        ordered += [key for _, _, key in sorted(group, key=lambda entry: -entry[1])]
    return ordered


def _agree(first: List[Any], second: List[Any]) -> bool:
    """Whether two orders of the same keys are nearly the same (Spearman's correlation)."""
    if len(first) != len(second):
        return False
    if first == second:
        return True
    place: Dict[Any, int] = {key: number for number, key in enumerate(first)}
    if set(place) != set(second):
        return False
    ranks = [place[key] for key in second]
    return bool(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1] >= _AGREEMENT)
