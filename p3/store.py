"""``P3KVStore``: what scripts, Trainer and Module call.

A call turns into one operation of MXNet's engine a key: it reads the gradient, writes the
weight, and ends when the servers have answered.  Nothing here waits for the network but
``set_optimizer`` and ``barrier`` (and creating the first store, which waits for the job's
roles); MXNet's own dependency tracking does the rest.

Values from several devices are summed by MXNet on the CPU before they leave, and results are
copied to every device's array.

Called from the script's training thread; not thread-safe, as MXNet's own stores are not.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from p3 import engine, ndarray, optimizers
from p3.errors import UnknownKeyError, UsageError
from p3.node import Node, enlist
from p3.server import unpickle
from p3.wire import REPLACE, WANT_VALUE
from p3.worker import INIT, PULL, PUSH, Key, Request, Worker

_DTYPES = frozenset("float16 float32 float64 int8 uint8 int32 int64".split())


class P3KVStore(mx.kvstore.KVStore):  # type: ignore[misc]
    """A distributed key-value store that sends the most urgent slice first.

    Keys are ints or strings; 5 and "5" are two keys.  Every method that takes a key takes a
    list of keys, too, with a list of values.  Raises ``PeerError`` as soon as this process
    knows that another one of the job has failed.
    """

    def __init__(self, kind: str) -> None:
        """``kind``: the store's ``type``.  Blocks until all roles of the job are there."""
        self._type = kind
        self._updater = None
        self._optimizer: Any = None
        self._changes: Optional[optimizers.Changes] = None
        self._keys: Dict[Any, Key] = {}
        self._pushes: Dict[Any, int] = {}
        self._step = 0
        self._node: Node = enlist()
        self._node.join()
        worker = self._node.worker
        assert worker is not None
        self._worker: Worker = worker
        self._space = self._node.new_space()

    def __del__(self) -> None:
        """Nothing to free: the connections belong to the process."""

    @property
    def type(self) -> str:
        """The store's type, in which MXNet looks for ``dist``, ``_sync`` and ``_async``."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self._node.rank

    @property
    def num_workers(self) -> int:
        """Workers in the job."""
        return self._node.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do ``capability``; the only one MXNet asks for is "optimizer"."""
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return True
        raise ValueError(f"Unknown capability: {capability}")

    def init(self, key: Any, value: Any) -> None:
        """Give ``key`` its first value: rank 0's, whatever the others pass.

        Returns at once.  Every rank must call it, with the same shape and dtype, before it
        pushes or pulls the key.  A key that is there already keeps its value.
        """
        for name, values in _pairs(key, value):
            self._check_alive()
            if name in self._keys:
                self._known(name, values)
                continue
            array = values[0]
            _check_array(name, array)
            state = Key(self._space, name, ndarray.shape(array), ndarray.dtype(array))
            self._keys[name] = state
            whole = self._optimizer is not None and optimizers.needs_whole_keys(self._optimizer)
            self._node.declare(state, "async" if "_async" in self._type else "sync", whole)
            if self.rank == 0:
                self._submit(Request(state, INIT), b"p3_init", source=_on_cpu(array))

    def replace(self, key: Any, value: Any) -> None:
        """Give ``key``, which is there already, rank 0's ``value``, whatever the others pass.

        Returns at once.  Every rank must call it, between the same two pushes of the key: it
        takes part in the order of the key's calls.  The optimizer's states stay.
        """
        for name, values in _pairs(key, value):
            state = self._known(name, values)
            if self.rank == 0:
                self._submit(
                    Request(state, INIT, flags=REPLACE), b"p3_replace", source=_on_cpu(values[0])
                )

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init`` with rank 0's ``value``, then ``pull`` into ``out``.  Returns at once."""
        self.init(key, value)
        self.pull(key, out, priority)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add ``value`` to the key's current round.  Returns at once.

        ``value``: an array of the key's shape and dtype, or one a device.  It may be changed
        or deleted at once: the engine sees to it that the old content is sent.
        """
        for name, values in _pairs(key, value):
            state = self._known(name, values)
            request = Request(state, PUSH, priority, *self._begin_push(name))
            self._submit(request, b"p3_push", source=self._reduce(values))

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Write the key's value into ``out``: that after this rank's latest push.

        Returns at once; whoever reads ``out`` waits.  ``out``: an array or one a device.
        """
        if out is None:
            raise UsageError(f"pull of key {key!r}: there is no `out` to pull into")
        for name, outs in _pairs(key, out):
            state = self._known(name, outs, writing=True)
            target = _target(state, outs)
            self._submit(Request(state, PULL, priority), b"p3_pull", target=target)
            _spread(target, outs)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """``push`` and ``pull`` in one: the result of the round that ``value`` takes part in.

        Returns at once.  ``out`` (default: ``value`` itself) gets the updated value, or the
        sum over all workers and devices where the store has no optimizer.
        """
        pairs = zip(_pairs(key, value), _pairs(key, value if out is None else out))
        for (name, values), (_, outs) in pairs:
            state = self._known(name, values)
            self._known(name, outs, writing=True)
            source, target = self._reduce(values), _target(state, outs)
            request = Request(state, PUSH, priority, *self._begin_push(name), WANT_VALUE)
            self._submit(request, b"p3_pushpull", source, target)
            _spread(target, outs)

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers apply ``optimizer``; blocks until all of them have it.

        All ranks call it with the same one; later calls keep the first one's states.
        Attributes of ``optimizer`` that the script changes later (learning rate, weight
        decay, ``rescale_grad``, multipliers, ...) take effect with the next push.
        """
        self._check_alive()
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise UsageError(f"set_optimizer needs an mx.optimizer.Optimizer, not {optimizer!r}")
        cut = [name for name, key in self._keys.items() if self._is_cut(key)]
        if optimizers.needs_whole_keys(optimizer) and cut:
            raise UsageError(
                f"set_optimizer: {type(optimizer).__name__} looks at each parameter in one piece,"
                f" but key {cut[0]!r} is already stored in slices; call set_optimizer before init"
            )
        pickled = optimizers.dump(optimizer)
        unpickle.loads(pickled, self._node.settings.allow_optimizers)
        self._node.control.ask("optimizer", {"space": self._space}, pickled).result()
        self._optimizer, self._changes = optimizer, optimizers.Changes(optimizer)

    def barrier(self) -> None:
        """Block until every worker has called this as often as this one has."""
        self._check_alive()
        self._node.control.barrier()

    _barrier = barrier

    def _submit(
        self, request: Request, name: bytes, source: Any = None, target: Any = None
    ) -> None:
        """Queue the request and enqueue its engine operation, which begins it."""
        nbytes = request.key.nbytes

        def start(operation: engine.Operation) -> None:
            written = None if target is None else ndarray.memory(target, nbytes, writing=True)
            read = None if source is None else ndarray.memory(source, nbytes)
            self._worker.begin(request, operation.complete, read, written)

        self._worker.enqueue(request)
        engine.submit(
            start,
            lambda reason: self._skip(request, reason),
            [] if source is None else [source],
            [] if target is None else [target],
            request.priority,
            name,
        )

    def _skip(self, request: Request, reason: str) -> None:
        """The engine did not begin the request: no rank can count on its key any more."""
        if request.op == PULL:  # of this rank's concern alone; whoever reads `out` is told
            self._worker.begin(request, lambda error: None)
            return
        what = f"rank {self.rank}: the array given to key {request.key.name!r}: {reason}"
        self._node.fail_key(request.key, what)

    def _check_alive(self) -> None:
        if os.getpid() != self._node.pid:
            raise UsageError(
                f"this store belongs to process {self._node.pid}, which forked this one; use it"
                " there"
            )
        if self._worker.error is not None:
            raise self._worker.error

    def _known(self, name: Any, arrays: Sequence[Any], writing: bool = False) -> Key:
        """The key, if it can take ``arrays``; raises what is wrong with the call or the key."""
        self._check_alive()
        key = self._keys.get(name)
        if key is None:
            raise UnknownKeyError(f"key {name!r} was never initialised: call init or broadcast")
        if key.error is not None:
            raise key.error
        for array in arrays:
            _check_array(name, array)
            shape, dtype = ndarray.shape(array), ndarray.dtype(array)
            if shape != key.shape:
                raise UsageError(f"key {name!r} has shape {key.shape}, not {shape}")
            if not writing and dtype != key.dtype:
                raise UsageError(f"key {name!r} has dtype {key.dtype}, not {dtype}")
        return key

    def _is_cut(self, key: Key) -> bool:
        return key.nbytes > self._node.settings.slice_elems * key.itemsize

    def _begin_push(self, name: Any) -> Tuple[int, bytes]:
        """The training step that a push of ``name`` belongs to, and what changed before it."""
        count = self._pushes[name] = self._pushes.get(name, 0) + 1
        self._step = max(self._step, count)
        return self._step, b"" if self._changes is None else self._changes.since_last_push(name)

    @staticmethod
    def _reduce(values: Sequence[Any]) -> Any:
        """The sum of the devices' values, on the CPU; the value itself if there is one."""
        arrays = [_on_cpu(value) for value in values]
        if len(arrays) == 1:
            return arrays[0]
        context = arrays[0].context
        return mx.nd.add_n(*[a.as_in_context(context).as_nd_ndarray() for a in arrays])


def _pairs(key: Any, value: Any) -> Iterator[Tuple[Any, List[Any]]]:
    """``(key, arrays)`` of a call: one key or a list of them, each with its devices' arrays."""
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(key):
            raise UsageError(f"{len(key)} keys need a list of {len(key)} values")
        for one, values in zip(key, value):
            yield from _pairs(one, values)
        return
    if isinstance(key, np.integer):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise UsageError(f"a key must be an int or a str, not {key!r}")
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays:
        raise UsageError(f"key {key!r}: an empty list of values")
    yield key, arrays


def _check_array(name: Any, array: Any) -> None:
    if not isinstance(array, mx.nd.NDArray):
        raise UsageError(f"key {name!r}: an mx.nd.NDArray is needed, not {type(array).__name__}")
    if not ndarray.is_dense(array):
        raise UsageError(f"key {name!r}: {array.stype} arrays are not supported")
    if ndarray.dtype(array) not in _DTYPES:
        raise UsageError(f"key {name!r}: dtype {ndarray.dtype(array)} is not supported")


def _on_cpu(array: Any) -> Any:
    """``array``, or its copy in pinned memory if it is on a GPU."""
    if ndarray.on_cpu(array):
        return array
    return array.as_in_context(mx.cpu_pinned())


def _target(key: Key, outs: Sequence[Any]) -> Any:
    """Where the result is written first: the first array that has its dtype and is on the CPU."""
    for array in outs:
        if ndarray.on_cpu(array) and ndarray.dtype(array) == key.dtype:
            return array
    on_gpu = outs[0].context.device_type == "gpu"
    context = mx.cpu_pinned() if on_gpu else mx.cpu()
    return mx.nd.empty(key.shape, context, key.dtype)


def _spread(target: Any, outs: Sequence[Any]) -> None:
    """Copy the result to the other devices' arrays."""
    for array in outs:
        if array is not target:
            target.copyto(array)
