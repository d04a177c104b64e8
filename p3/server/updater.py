"""Apply MXNet's optimizers to a shard's units, with the numbers that local training gives.

Each unit is a parameter of its own to ``mx.optimizer``: a key in one piece keeps its key as
the index, so every look-up by index or by name works as it does locally; a slice has a
``SliceIndex``, and the multipliers that its key would find are looked up for it.

Optimizers count updates by index and take the learning rate from the largest count; a shard
holds only some keys, so before each update the count of training steps that came with the
push is put in its place.  Attributes that changed on the caller's optimizer since the last
push of the key come with the push too, as JSON, so they take effect in the same round on
every shard, and states stay.

In a server process operations are complete when they return (NaiveEngine); embedded in a
worker, under an asynchronous engine, ``apply`` waits for the arrays that it touched.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

from p3 import engine
from p3.rounds import Array, Push, total
from p3.server.sgd import Sgd
from p3.server.shard import Unit
from p3.server.unpickle import loads


class SliceIndex:
    """What a slice is called in the optimizer's tables (a tuple would mean several indices)."""

    __slots__ = ("key", "slice")

    def __init__(self, key: Any, number: int) -> None:
        self.key, self.slice = key, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceIndex) and self._pair() == other._pair()

    def __hash__(self) -> int:
        return hash(self._pair())

    def _pair(self) -> Tuple[Any, int]:
        return self.key, self.slice

    def __repr__(self) -> str:
        return f"{self.key!r}[slice {self.slice}]"


class _Multipliers(NamedTuple):
    """What ``Optimizer.param_dict`` holds of a parameter, as far as optimizers look."""

    lr_mult: float
    wd_mult: float


class Updater:
    """One space's optimizer on one server.  Owned by the server's loop."""

    def __init__(self, pickled: bytes, allowed: Iterable[str]) -> None:
        """``pickled``: the caller's optimizer; ``allowed``: modules of its own that may load."""
        self.pickled = pickled
        self._optimizer = loads(pickled, allowed)
        self._updater = mx.optimizer.get_updater(self._optimizer)
        self._values: Dict[Any, Any] = {}  # index -> the unit's value as an NDArray
        self._sgd = Sgd()
        self._momenta: Dict[Any, Optional[Array]] = {}
        # shape, dtype -> where gradients are summed: an NDArray, and its memory as a flat array
        self._sums: Dict[Tuple[Tuple[int, ...], str], Tuple[Any, Array]] = {}

    def apply(self, unit: Unit, pushes: List[Push]) -> None:
        """Update the unit's value in place by the pushes' sum; raises what the optimizer does."""
        key = unit.entry.key
        index = key if unit.whole else SliceIndex(key, next(iter(unit.slices)))
        if pushes[0].extra:
            self._adopt(key, index, json.loads(pushes[0].extra))
        optimizer, step = self._optimizer, pushes[0].records[0].step
        optimizer.num_update = max(optimizer.num_update, optimizer.begin_num_update + step)
        weight = self._values.get(index)
        if weight is None:
            weight = self._values[index] = self._wrap(unit)
        gradient, memory = self._sum(weight.shape, unit.entry.dtype)
        total(pushes, memory)
        if type(optimizer) is mx.optimizer.SGD and unit.entry.dtype == "float32":
            self._apply_sgd(index, unit.value, memory, weight)
            return
        self._updater(index, gradient, weight)
        if not engine.NAIVE:
            weight.wait_to_read()
            engine.wait_to_write(gradient)

    def _apply_sgd(self, index: Any, value: Array, gradient: Array, weight: Any) -> None:
        """What the updater would do, by ``sgd.py``; the state stays where the updater has it."""
        if index not in self._momenta:
            state = self._optimizer.create_state(index, weight)
            self._updater.states[index], self._updater.states_synced[index] = state, True
            self._momenta[index] = None if state is None else _memory(state)
        self._optimizer._update_count(index)
        lr, wd = self._optimizer._get_lr(index), self._optimizer._get_wd(index)
        self._sgd.update(value, gradient, self._momenta[index], lr, wd, self._optimizer)

    def _adopt(self, key: Any, index: Any, changes: Dict[str, Any]) -> None:
        """Take over the attributes that changed on the caller's optimizer."""
        optimizer = self._optimizer
        multipliers = changes.pop("multipliers", None)
        for name, value in changes.items():
            setattr(optimizer, name, value)
        if multipliers is not None:
            optimizer.param_dict[key] = _Multipliers(*multipliers)
        if isinstance(index, SliceIndex):
            optimizer.param_dict[index] = _multipliers_of(optimizer, key)

    def _sum(self, shape: Tuple[int, ...], dtype: str) -> Tuple[Any, Array]:
        found = self._sums.get((shape, dtype))
        if found is None:
            array = mx.nd.zeros(shape, dtype=dtype)
            found = self._sums[shape, dtype] = (array, _memory(array))
        return found

    @staticmethod
    def _wrap(unit: Unit) -> Any:
        """The unit's value as an NDArray over the same memory, in the optimizer's shape."""
        flat = unit.value.view()  # from_numpy makes what it is given read-only: not the value
        return mx.nd.from_numpy(flat.reshape(unit.entry.shape) if unit.whole else flat)


def _memory(array: Any) -> Array:
    """A CPU array's memory, flat; waits until it is computed."""
    array.wait_to_read()
    dtype = np.dtype(array.dtype)
    return np.frombuffer(engine.memory(array, array.size * dtype.itemsize), dtype)


def _multipliers_of(optimizer: Any, key: Any) -> _Multipliers:
    """The multipliers that ``optimizer`` gives ``key``, in its own order of look-ups."""
    if key in optimizer.param_dict:
        found = optimizer.param_dict[key]
        return _Multipliers(found.lr_mult, found.wd_mult)
    name = optimizer.idx2name.get(key)

    def find(table: Dict[Any, float]) -> float:
        return table[key] if key in table else table.get(name, 1.0)

    return _Multipliers(find(optimizer.lr_mult), find(optimizer.wd_mult))
