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

from p3 import engine, ndarray
from p3.rounds import Array, Push, total
from p3.server.sgd import Sgd
from p3.server.shard import Unit
from p3.server.unpickle import loads


class SliceIndex:
    """What a slice is called in the optimizer's tables; equal to itself alone.

    A tuple would not do: to the optimizer it means several indices.
    """

    def __init__(self, unit: Unit) -> None:
        self._name = unit.name

    def __repr__(self) -> str:
        return self._name


class _Multipliers(NamedTuple):
    """What ``Optimizer.param_dict`` holds of a parameter, as far as optimizers look."""

    lr_mult: float
    wd_mult: float


class _Slot:
    """What the updater keeps of a unit: its index, and its arrays as the optimizer sees them.

    ``gradient`` is shared by all units of a shape; ``sum`` is its memory, flat.  ``momentum``:
    that of ``sgd.py``, flat, or ``None``; ``prepared`` once it is there.
    """

    def __init__(self, unit: Unit, gradient: Any) -> None:
        self.index = unit.entry.key if unit.whole else SliceIndex(unit)
        self.bind(unit)
        self.gradient = gradient
        self.sum = _memory(gradient)
        self.momentum: Optional[Array] = None
        self.prepared = False

    def bind(self, unit: Unit) -> None:
        """Have the optimizer update the memory that is the unit's value now."""
        self.value = unit.value
        flat = unit.value.view()  # from_numpy makes what it is given read-only: not the value
        self.weight = mx.nd.from_numpy(flat.reshape(unit.entry.shape) if unit.whole else flat)


class Updater:
    """One space's optimizer on one server.  Owned by the server's loop."""

    def __init__(self, pickled: bytes, allowed: Iterable[str]) -> None:
        """``pickled``: the caller's optimizer; ``allowed``: modules of its own that may load."""
        self.pickled = pickled
        self._optimizer = loads(pickled, allowed)
        self._updater = mx.optimizer.get_updater(self._optimizer)
        self._sgd = Sgd() if type(self._optimizer) is mx.optimizer.SGD else None
        self._slots: Dict[Unit, _Slot] = {}
        self._gradients: Dict[Tuple[Tuple[int, ...], str], Any] = {}  # by shape and dtype

    def apply(self, unit: Unit, pushes: List[Push]) -> None:
        """Update the unit's value in place by the pushes' sum; raises what the optimizer does."""
        slot = self._slots.get(unit) or self._new_slot(unit)
        if slot.value is not unit.value:
            slot.bind(unit)
        optimizer, first = self._optimizer, pushes[0]
        if first.extra:
            self._adopt(unit.entry.key, slot.index, json.loads(first.extra))
        step = optimizer.begin_num_update + first.records[0].step
        optimizer.num_update = max(optimizer.num_update, step)
        if self._sgd is not None and unit.entry.dtype == "float32":
            self._apply_sgd(self._sgd, slot, unit.value, pushes)
            return
        total(pushes, slot.sum)
        self._updater(slot.index, slot.gradient, slot.weight)
        if not engine.NAIVE:
            slot.weight.wait_to_read()
            ndarray.wait_to_write(slot.gradient)

    def _new_slot(self, unit: Unit) -> _Slot:
        shape = unit.entry.shape if unit.whole else unit.value.shape
        gradient = self._gradients.get((shape, unit.entry.dtype))
        if gradient is None:
            gradient = mx.nd.zeros(shape, dtype=unit.entry.dtype)
            self._gradients[shape, unit.entry.dtype] = gradient
        slot = self._slots[unit] = _Slot(unit, gradient)
        return slot

    def _apply_sgd(self, sgd: Sgd, slot: _Slot, value: Array, pushes: List[Push]) -> None:
        """What the updater would do, by ``sgd.py``; the state stays where the updater has it."""
        optimizer, index = self._optimizer, slot.index
        if not slot.prepared:
            state = optimizer.create_state(index, slot.weight)
            self._updater.states[index], self._updater.states_synced[index] = state, True
            slot.momentum, slot.prepared = None if state is None else _memory(state), True
        gradient = slot.sum
        if len(pushes) == len(pushes[0].parts) == 1:
            gradient = pushes[0].parts[0]
        else:
            total(pushes, gradient)
        optimizer._update_count(index)
        lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
        sgd.update(value, gradient, slot.momentum, lr, wd, optimizer)

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


def _memory(array: Any) -> Array:
    """A CPU array's memory, flat; waits until it is computed."""
    array.wait_to_read()
    dtype = np.dtype(array.dtype)
    return np.frombuffer(ndarray.memory(array, array.size * dtype.itemsize), dtype)


def _multipliers_of(optimizer: Any, key: Any) -> _Multipliers:
    """The multipliers that ``optimizer`` gives ``key``, in its own order of look-ups."""
    if key in optimizer.param_dict:
        found = optimizer.param_dict[key]
        return _Multipliers(found.lr_mult, found.wd_mult)
    name = optimizer.idx2name.get(key)

    def find(table: Dict[Any, float]) -> float:
        return table[key] if key in table else table.get(name, 1.0)

    return _Multipliers(find(optimizer.lr_mult), find(optimizer.wd_mult))
