"""Apply MXNet's optimizers to a shard's units, with the numbers that local training gives.

Each unit is a parameter of its own to ``mx.optimizer``: a key in one piece keeps its key as
the index, so every look-up by index or by name works as it does locally; a slice has a
``SliceIndex``.

What a server cannot know of the optimizer comes with the pushes, as JSON, when it has changed:
the learning rate of the training step, the key's multipliers, attributes that the script
changed (``p3/optimizers.py``).  Each key keeps what it was told and is updated by that, so a
change takes effect in the same round on every shard, however far apart the keys are; states
stay.  Rank 0 is who is listened to; of an asynchronous key, the rank that pushes.

In a server process operations are complete when they return (NaiveEngine); embedded in a
worker, under an asynchronous engine, ``apply`` waits for the arrays that it touched.
"""

from __future__ import annotations

import json
import pickle
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

from p3 import engine, ndarray, optimizers
from p3.errors import UsageError
from p3.rounds import Array, Push, total
from p3.rows import Rows
from p3.server.sgd import Sgd
from p3.server.shard import Unit
from p3.server.touched import update_rows
from p3.server.unpickle import loads
from p3.states import Piece, cut, to_mxnet, to_numpy


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


class _Told:
    """What the pushes of one rank have said about the optimizer, for one unit."""

    def __init__(self) -> None:
        self.attributes: Dict[str, Any] = {}
        self.multipliers = _Multipliers(1.0, 1.0)
        self.seed: Optional[int] = None


class _Slot:
    """What the updater keeps of a unit: its index, and its arrays as the optimizer sees them.

    ``momentum``: that of ``sgd.py``, flat, or ``None``; ``prepared`` once it is there.
    """

    def __init__(self, unit: Unit) -> None:
        self.index = unit.entry.key if unit.whole else SliceIndex(unit)
        self.bind(unit)
        self.told: Dict[int, _Told] = {}  # by rank
        self.updates = 0
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
        self._pickled, self._allowed = pickled, tuple(allowed)
        self._optimizer = loads(pickled, self._allowed)
        self._updater = mx.optimizer.get_updater(self._optimizer)
        self._sgd = Sgd() if type(self._optimizer) is mx.optimizer.SGD else None
        #: LBSGD keeps the gradients that it is given, and so may others
        self._shares_gradients = not optimizers.needs_whole_keys(self._optimizer)
        self._slots: Dict[Unit, _Slot] = {}
        self._gradients: Dict[Tuple[Tuple[int, ...], str], Tuple[Any, Array]] = {}
        self._loaded: Dict[Any, Any] = {}  # whole keys' states, from a file
        self._base: Dict[str, Any] = {}  # attributes that some key was told, as they came

    def check(self, pickled: bytes) -> None:
        """Raise ``UsageError`` if another rank's optimizer is not the one that is applied."""
        if pickled != self._pickled:
            here, there = (loads(text, self._allowed) for text in (pickled, self._pickled))
            optimizers.refuse_another(here, there)

    def apply(self, unit: Unit, pushes: List[Push]) -> None:
        """Update the unit's value in place by the pushes' sum; raises what the optimizer does."""
        slot = self._slots.get(unit) or self._new_slot(unit)
        if slot.value is not unit.value:  # it has been replaced
            slot.bind(unit)
        self._listen(slot, unit, pushes[0])
        if isinstance(pushes[0].parts[0], Rows) and update_rows(self._updater, slot, pushes):
            return
        if self._sgd is not None and unit.entry.dtype == "float32":
            self._apply_sgd(self._sgd, slot, unit.value, pushes)
            return
        gradient, memory = self._gradient(slot.weight.shape, unit.entry.dtype)
        total(pushes, memory)
        self._updater(slot.index, gradient, slot.weight)
        if not engine.NAIVE:
            slot.weight.wait_to_read()
            ndarray.wait_to_write(gradient)

    def get_states(self) -> bytes:
        """The states of all units that have been updated, as a pickled list of ``Piece``s."""
        states = self._updater.states
        pieces = [
            tuple(
                Piece(
                    unit.entry.key,
                    unit.entry.shape,
                    unit.start,
                    unit.start + len(unit.value),
                    self._optimizer._index_update_count.get(slot.index, 0),
                    to_numpy(states[slot.index]),
                )
            )
            for unit, slot in self._slots.items()
            if slot.index in states
        ]
        return pickle.dumps(pieces, protocol=4)

    def set_states(self, pickled: bytes) -> None:
        """Go on from whole keys' states, and from an optimizer if there is one with them."""
        self._loaded, optimizer = loads(pickled)
        if optimizer is not None:
            self._pickled, self._optimizer = optimizer, loads(optimizer, self._allowed)
            self._updater.optimizer, self._base = self._optimizer, {}
        self._updater.states.clear()
        self._updater.states_synced.clear()
        for unit, slot in self._slots.items():
            if optimizer is not None:
                slot.told = {}  # that was about the old one
            self._load(unit, slot)

    def _new_slot(self, unit: Unit) -> _Slot:
        slot = self._slots[unit] = _Slot(unit)
        self._load(unit, slot)
        return slot

    def _load(self, unit: Unit, slot: _Slot) -> None:
        """Give the unit its part of what the optimizer and its states say of the key."""
        key, counts = unit.entry.key, self._optimizer._index_update_count
        if key in counts:  # the optimizer has been used before
            counts[slot.index] = counts[key]
        if key in self._loaded:
            stop, shape = unit.start + len(unit.value), slot.weight.shape
            part = cut(self._loaded[key], unit.entry.size, unit.start, stop, shape)
            self._updater.states[slot.index] = to_mxnet(part)
            self._updater.states_synced[slot.index] = True
        slot.prepared = False

    def _listen(self, slot: _Slot, unit: Unit, push: Push) -> None:
        """Make the optimizer what ``push`` and the earlier ones of its rank say."""
        optimizer, attributes = self._optimizer, vars(self._optimizer)
        optimizer.num_update = optimizer.begin_num_update + push.records[0].step
        attributes.update(self._base)
        told = slot.told.get(push.rank)
        if push.extra:
            told = told or slot.told.setdefault(push.rank, _Told())
            self._learn(told, json.loads(push.extra))
        if told is not None:
            attributes.update(told.attributes)
            optimizer.param_dict[slot.index] = told.multipliers
            if told.seed is not None and engine.NAIVE:  # else it is the script's own generator
                slot.updates += 1
                text = repr((told.seed, unit.entry.key, unit.start, slot.updates))
                mx.random.seed(zlib.crc32(text.encode()))

    def _learn(self, told: _Told, changes: Dict[str, Any]) -> None:
        told.seed = changes.pop("seed", told.seed)
        told.multipliers = _Multipliers(*changes.pop("multipliers", told.multipliers))
        if "lr" in changes:
            changes["lr_scheduler"] = None  # the worker's has been asked
        for name in changes:
            self._base.setdefault(name, getattr(self._optimizer, name, None))
        told.attributes.update(changes)

    def _gradient(self, shape: Tuple[int, ...], dtype: str) -> Tuple[Any, Array]:
        """Room for a gradient, and its memory, flat; the same for all units of a shape."""
        found = self._gradients.get((shape, dtype))
        if found is None:
            array = mx.nd.zeros(shape, dtype=dtype)
            found = array, _memory(array)
            if self._shares_gradients:
                self._gradients[shape, dtype] = found
        return found

    def _apply_sgd(self, sgd: Sgd, slot: _Slot, value: Array, pushes: List[Push]) -> None:
        """What the updater would do, by ``sgd.py``; the state stays where the updater has it."""
        optimizer, index = self._optimizer, slot.index
        if not slot.prepared:
            states = self._updater.states
            if index not in states:
                states[index] = optimizer.create_state(index, slot.weight)
                self._updater.states_synced[index] = True
            state = states[index]
            slot.momentum, slot.prepared = None if state is None else _memory(state), True
        if optimizer.momentum > 0 and slot.momentum is None:
            raise UsageError("momentum was 0 at the first update, so there is none to go on with")
        only = pushes[0].parts[0]
        if len(pushes) == len(pushes[0].parts) == 1 and not isinstance(only, Rows):
            gradient = only
        else:
            _, gradient = self._gradient(slot.weight.shape, "float32")
            total(pushes, gradient)
        optimizer._update_count(index)
        lr, wd = optimizer._get_lr(index), optimizer._get_wd(index)
        sgd.update(value, gradient, slot.momentum, lr, wd, optimizer)


def _memory(array: Any) -> Array:
    """A CPU array's memory, flat; waits until it is computed."""
    array.wait_to_read()
    dtype = np.dtype(array.dtype)
    return np.frombuffer(ndarray.memory(array, array.size * dtype.itemsize), dtype)
