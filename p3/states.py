"""Optimizer states between servers, where they are in slices, and files, where they are whole.

A state is what ``mx.optimizer`` keeps of a parameter: an array, ``None``, a number, or a tuple
or list of states.  An array as large as the parameter is cut and joined as the parameter is;
any other is the same in every slice.  In between, arrays are NumPy's.

``kv._updater`` is a ``RemoteUpdater``: it has the methods and the file format of
``mx.optimizer.Updater``, so ``save_optimizer_states`` and ``load_optimizer_states`` write and
read what local training does, for any number of servers.
"""

from __future__ import annotations

import pickle
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

from p3 import optimizers
from p3.errors import UsageError
from p3.server import unpickle

State = Any  # see the module's text


class Piece(NamedTuple):
    """The state of elements ``start`` to ``stop`` of a key of that ``shape``.

    ``updates``: how many the optimizer has made of it.
    """

    key: Any
    shape: Tuple[int, ...]
    start: int
    stop: int
    updates: int
    state: State


def to_numpy(state: State) -> State:
    """A copy with NumPy's arrays.  Blocks until they are computed."""
    return _map(state, lambda leaf: leaf.asnumpy() if isinstance(leaf, mx.nd.NDArray) else leaf)


def to_mxnet(state: State) -> State:
    """A copy with MXNet's arrays, on the CPU."""
    return _map(
        state,
        lambda leaf: mx.nd.array(leaf, dtype=leaf.dtype) if isinstance(leaf, np.ndarray) else leaf,
    )


def cut(state: State, size: int, start: int, stop: int, shape: Tuple[int, ...]) -> State:
    """The part for elements ``start`` to ``stop`` of a parameter of ``size``, in ``shape``."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.size == size:
            return leaf.reshape(-1)[start:stop].reshape(shape)
        return leaf

    return _map(state, part)


def join(pieces: List[Piece]) -> State:
    """The state of a key from all its pieces, in order."""
    if len(pieces) == 1:
        return pieces[0].state

    def whole(*leaves: Any) -> Any:
        sizes = [piece.stop - piece.start for piece in pieces]
        first = leaves[0]
        if isinstance(first, np.ndarray) and [leaf.size for leaf in leaves] == sizes:
            return np.concatenate([leaf.reshape(-1) for leaf in leaves]).reshape(pieces[0].shape)
        return first

    return _map(pieces[0].state, whole, *(piece.state for piece in pieces[1:]))


def _map(state: State, change: Callable[..., Any], *others: State) -> State:
    """``change`` of every leaf, together with the leaves at its place in ``others``."""
    if isinstance(state, (tuple, list)):
        inner = [_map(item, change, *(o[i] for o in others)) for i, item in enumerate(state)]
        return tuple(inner) if isinstance(state, tuple) else inner
    return change(state, *others)


def _joined(pieces: Dict[Any, List[Piece]]) -> Dict[Any, State]:
    """The whole states, by key, of MXNet's arrays."""
    return {
        key: to_mxnet(join(sorted(found, key=lambda piece: piece.start)))
        for key, found in pieces.items()
    }


class RemoteUpdater:
    """The servers' updaters of one store, seen from a worker.  For the training thread.

    ``optimizer``: the script's; ``changes``: what each push tells about it.
    """

    def __init__(
        self,
        optimizer: Any,
        seed: Optional[int],
        ask: Callable[[str, bytes], List[bytes]],
        settle: Callable[[], None],
        allowed: Tuple[str, ...],
    ) -> None:
        """``ask(name, blob)``: a command to all servers, and their answers; ``settle``: wait
        for all operations of this process; ``allowed``: see ``unpickle.py``.
        """
        self.optimizer = optimizer
        self.changes = optimizers.Changes(optimizer, seed)
        self._seed, self._ask, self._settle, self._allowed = seed, ask, settle, allowed

    def follow(self, optimizer: Any) -> None:
        """From now on tell of ``optimizer``; raises ``UsageError`` if it is another one."""
        self.changes.follow(optimizer)
        self.optimizer = optimizer

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Refused: raises ``UsageError``."""
        raise UsageError("this store's optimizer runs on the servers: push the gradient instead")

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """All states after this rank's latest push, as ``mx.optimizer.Updater`` gives them.

        Blocks until they have come.  Every rank may call it, or one.
        """
        pieces = self._pieces()
        states = _joined(pieces)
        if not dump_optimizer:
            return pickle.dumps(states)
        optimizer = self.changes.as_applied()
        # of an asynchronous key this rank has pushed a part of the updates only
        updates = {key: max(piece.updates for piece in found) for key, found in pieces.items()}
        optimizer._index_update_count.update(updates)
        optimizer.num_update = max([optimizer.num_update, *updates.values()])
        return pickle.dumps((states, optimizer))

    @property
    def states(self) -> Dict[Any, State]:
        """A copy of all states after this rank's latest push, by key.  Blocks until it is here."""
        return _joined(self._pieces())

    def _pieces(self) -> Dict[Any, List[Piece]]:
        """The states on all servers, by key.  Blocks until they have come."""
        self._settle()
        pieces: Dict[Any, List[Piece]] = {}
        for blob in self._ask("get_states", b""):
            for fields in unpickle.loads(blob):
                piece = Piece(*fields)
                pieces.setdefault(piece.key, []).append(piece)
        return pieces

    def set_states(self, states: bytes) -> None:
        """Have the servers go on from what ``get_states``, here or in local training, gave.

        Blocks until all servers have it.  Every rank must call it between the same two pushes.
        With an optimizer in ``states``, that one is ``optimizer`` from now on.  Raises
        ``UsageError`` for anything else.
        """
        self._settle()
        loaded, optimizer = unpickle.loads(states, self._allowed), None
        if isinstance(loaded, tuple) and len(loaded) == 2:
            loaded, optimizer = loaded
        if not isinstance(loaded, dict):
            raise UsageError(f"optimizer states must be a dict by key, not {type(loaded).__name__}")
        pickled = None if optimizer is None else optimizers.dump(optimizer)
        content = {key: to_numpy(state) for key, state in loaded.items()}
        self._ask("set_states", pickle.dumps((content, pickled), protocol=4))
        if optimizer is not None:
            self.optimizer = optimizer
            self.changes = optimizers.Changes(optimizer, self._seed)
