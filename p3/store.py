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
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx

from p3 import arguments, compression, ndarray, optimizers, sparse
from p3.compression import Compression
from p3.errors import UnknownKeyError, UsageError
from p3.node import Node, enlist
from p3.operations import Operations
from p3.refused import NativeCalls
from p3.server import unpickle
from p3.states import RemoteUpdater
from p3.wire import COMPRESSED, REPLACE, ROWS, WANT_VALUE
from p3.worker import INIT, PULL, PUSH, Key, Request, Worker


class P3KVStore(NativeCalls):
    """A distributed key-value store that sends the most urgent slice first.

    Keys are ints or strings; 5 and "5" are two keys.  Every method that takes a key takes a
    list of keys, too, with a list of values.  Raises ``PeerError`` as soon as this process
    knows that another one of the job has failed.
    """

    def __init__(self, kind: str) -> None:
        """``kind``: the store's ``type``.  Blocks until all roles of the job are there."""
        self._type = kind
        self._updater: Optional[RemoteUpdater] = None  # once there is an optimizer
        self._compression: Optional[Compression] = None
        self._keys: Dict[Any, Key] = {}
        self._pushes: Dict[Any, int] = {}
        self._step = 0
        self._node: Node = enlist()
        self._node.join()
        worker = self._node.worker
        assert worker is not None
        self._worker: Worker = worker
        self._operations = Operations(self._node, worker)
        self._space = self._node.new_space()

    def sibling(self) -> P3KVStore:
        """A store like this one, with keys and an optimizer of its own; all ranks make it."""
        other = P3KVStore(self._type)
        other._compression = self._compression
        return other

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
        for name, values in arguments.pairs(key, value):
            self.check_alive()
            if name in self._keys:
                self._known(name, values, sparse=True)
                continue
            array = values[0]
            dtype = arguments.check_array(name, array, sparse=True)
            if sparse.is_row_sparse(array):
                array = array.tostype("default")
            state = Key(self._space, name, ndarray.shape(array), dtype)
            self._keys[name] = state
            updater = self._updater
            whole = updater is not None and optimizers.needs_whole_keys(updater.optimizer)
            mode = "async" if self._is_async else "sync"
            # of asynchronous pushes several servers would make several orders
            self._node.declare(state, mode, whole or self._is_async)
            if self.rank == 0:
                self._operations.submit(
                    Request(state, INIT), b"p3_init", source=arguments.on_cpu(array)
                )

    def replace(self, key: Any, value: Any) -> None:
        """Give ``key``, which is there already, rank 0's ``value``, whatever the others pass.

        Returns at once.  Every rank must call it, between the same two pushes of the key: it
        takes part in the order of the key's calls.  The optimizer's states stay.  With a
        row-sparse ``value`` it blocks until every rank has called it: other ranks' next forward
        pass reads rows of the servers' value, not of their own.
        """
        for name, values in arguments.pairs(key, value):
            state, array = self._known(name, values, sparse=True), values[0]
            rows_only = sparse.is_row_sparse(array)
            if self.rank == 0:
                array = array.tostype("default") if rows_only else array
                self._operations.submit(
                    Request(state, INIT, flags=REPLACE),
                    b"p3_replace",
                    source=arguments.on_cpu(array),
                )
            if rows_only:
                self._node.settle()
                self.barrier()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init`` with rank 0's ``value``, then ``pull`` into ``out``.  Returns at once."""
        self.init(key, value)
        self.pull(key, out, priority)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add ``value`` to the key's current round.  Returns at once.

        ``value``: an array of the key's shape and dtype, or one a device.  It may be changed
        or deleted at once: the engine sees to it that the old content is sent.
        """
        for name, values in arguments.pairs(key, value):
            state = self._known(name, values, sparse=True)
            arrays = sparse.alike(values)
            if sparse.is_row_sparse(arrays[0]):
                request = Request(state, PUSH, priority, *self._begin_push(name), ROWS)
                self._operations.push_rows(request, arrays)
            else:
                self._operations.submit(
                    self._push_of(state, priority), b"p3_push", arguments.total(arrays)
                )

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Write the key's value into ``out``: that after this rank's latest push.

        Returns at once; whoever reads ``out`` waits.  ``out``: an array or one a device.
        Row-sparse ones are passed over, or, without ``ignore_sparse``, get all rows as by
        ``row_sparse_pull``.
        """
        if out is None:
            raise UsageError(f"pull of key {key!r}: there is no `out` to pull into")
        for name, outs in arguments.pairs(key, out):
            state = self._known(name, outs, writing=True, sparse=True)
            if any(map(sparse.is_row_sparse, outs)):
                if not ignore_sparse:
                    self.row_sparse_pull(
                        name, outs, priority, mx.nd.arange(state.shape[0], dtype="int64")
                    )
                continue
            target = arguments.target(state, outs)
            self._operations.submit(Request(state, PULL, priority), b"p3_pull", target=target)
            arguments.spread(target, outs)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """``push`` and ``pull`` in one: the result of the round that ``value`` takes part in.

        Returns at once.  ``out`` (default: ``value`` itself) gets the updated value, or the
        sum over all workers and devices where the store has no optimizer.
        """
        out = value if out is None else out
        both = list(zip(arguments.pairs(key, value), arguments.pairs(key, out)))
        if len(both) > 1 and arguments.overwritten(both):
            self.push(key, value, priority)
            self.pull(key, out, priority, ignore_sparse=False)
            return
        for (name, values), (_, outs) in both:
            if sparse.is_row_sparse(values[0]):
                self.push(name, values, priority)
                self.pull(name, outs, priority, ignore_sparse=False)
                continue
            state = self._known(name, values)
            self._known(name, outs, writing=True)
            source, target = arguments.total(values), arguments.target(state, outs)
            request = self._push_of(state, priority, WANT_VALUE)
            self._operations.submit(request, b"p3_pushpull", source, target)
            arguments.spread(target, outs)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Make the row-sparse ``out`` consist of the rows ``row_ids`` of the key's value.

        Blocks until they have come.  ``out``: an array or one a device; ``row_ids``: an array
        of row numbers in any order, also repeated, or one for each ``out``.
        """
        if out is None or row_ids is None:
            raise UsageError(f"row_sparse_pull of key {key!r} needs out and row_ids")
        for (name, outs), (_, ids) in zip(arguments.pairs(key, out), arguments.pairs(key, row_ids)):
            state = self._known(name, outs, writing=True, sparse=True)
            if not all(map(sparse.is_row_sparse, outs)) or len(ids) not in (1, len(outs)):
                raise UsageError(
                    f"row_sparse_pull of key {name!r} needs row-sparse arrays as out, and an array"
                    f" of row_ids for each of the {len(outs)} or one for all: {len(ids)} were given"
                )
            for array, wanted in zip(outs, ids if len(ids) > 1 else ids * len(outs)):
                rows = sparse.wanted(name, wanted, state.shape[0])
                sparse.fill(array, rows, self._operations.pull_rows(state, rows, priority))

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Compress the pushes of float32 keys from now on; see ``compression.py`` for types.

        ``compression_params``: ``{"type": "2bit", "threshold": 0.5}``, or type 1bit, fp16 or
        none.  Row-sparse gradients, first values and results are not compressed.  Raises
        ``UsageError`` for anything else, and later for pushes that are not float32.
        """
        self._compression = compression.parse(compression_params)

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers apply ``optimizer``; blocks until all of them have it.

        All ranks call it with the same one; later calls keep the states, and raise if the
        optimizer is another one.  Attributes of ``optimizer`` that the script changes later
        (learning rate, weight decay, ``rescale_grad``, multipliers, ...) take effect with the
        next push.  Raises ``UsageError`` if the servers cannot have it, or have another one.
        """
        self.check_alive()
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise UsageError(f"set_optimizer needs an mx.optimizer.Optimizer, not {optimizer!r}")
        if self._updater is not None:
            self._updater.follow(optimizer)
            return
        cut = [name for name, key in self._keys.items() if self._is_cut(key)]
        if optimizers.needs_whole_keys(optimizer) and cut:
            raise UsageError(
                f"set_optimizer: {type(optimizer).__name__} looks at each parameter in one piece,"
                f" but key {cut[0]!r} is already stored in slices; call set_optimizer before init"
            )
        pickled, allowed = optimizers.dump(optimizer), self._node.settings.allow_optimizers
        unpickle.loads(pickled, allowed)
        draws = optimizers.draws(optimizer)
        seed = int(mx.nd.random.randint(0, 2**31 - 1, (1,)).asscalar()) if draws else None
        updater = RemoteUpdater(optimizer, seed, self._ask, self._node.settle, allowed)
        self._ask("optimizer", pickled)
        self._updater = updater

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of all keys after this rank's latest push to the file ``fname``.

        Blocks until they are written.  The file is that of local training: MXNet's
        ``Updater`` reads it, and so does a job with other servers.  ``dump_optimizer``: with
        the optimizer, its counts and its schedule.  It replaces the file at once, so several
        ranks may write the same one.
        """
        states = self._remote_updater("save_optimizer_states").get_states(dump_optimizer)
        new = f"{fname}.{self.rank}.new"
        with open(new, "wb") as file:
            file.write(states)
        os.replace(new, fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Have the servers go on from the states in the file ``fname``.

        Blocks until all servers have them.  Every rank must call it, between the same two
        pushes.  Raises ``UsageError`` if the file holds anything else.
        """
        updater = self._remote_updater("load_optimizer_states")
        with open(fname, "rb") as file:
            updater.set_states(file.read())

    def _remote_updater(self, caller: str) -> RemoteUpdater:
        self.check_alive()
        if self._updater is None:
            raise UsageError(
                f"{caller}: this store has no optimizer, so its servers keep no states; where the"
                " workers update, save those of your own mx.optimizer.Updater"
            )
        return self._updater

    def _ask(self, name: str, blob: bytes) -> List[bytes]:
        """A command to all servers; blocks until each has answered."""
        answers = self._node.control.ask(name, {"space": self._space}, blob).result()
        return [found for _, found in answers]

    def barrier(self) -> None:
        """Block until every worker has called this as often as this one has."""
        self.check_alive()
        self._node.control.barrier()

    _barrier = barrier

    def _push_of(self, key: Key, priority: int, flags: int = 0) -> Request:
        """The request for the next push of all of ``key``."""
        if self._compression is not None:
            if key.dtype != "float32":
                raise UsageError(
                    f"key {key.name!r} is {key.dtype}: gradient compression takes float32 only"
                )
            flags |= COMPRESSED
        step, extra = self._begin_push(key.name)
        return Request(key, PUSH, priority, step, extra, flags, compression=self._compression)

    def check_alive(self) -> None:
        """Raise if the job has failed or this process is not the store's."""
        if os.getpid() != self._node.pid:
            raise UsageError(
                f"this store belongs to process {self._node.pid}, which forked this one; use it"
                " there"
            )
        if self._worker.error is not None:
            raise self._worker.error

    def _known(
        self, name: Any, arrays: Sequence[Any], writing: bool = False, sparse: bool = False
    ) -> Key:
        """The key, if it can take ``arrays``; raises what is wrong with the call or the key."""
        self.check_alive()
        key = self._keys.get(name)
        if key is None:
            raise UnknownKeyError(f"key {name!r} was never initialised: call init or broadcast")
        if key.error is not None:
            raise key.error
        for array in arrays:
            dtype, shape = arguments.check_array(name, array, sparse), ndarray.shape(array)
            if shape != key.shape:
                raise UsageError(f"key {name!r} has shape {key.shape}, not {shape}")
            if not writing and dtype != key.dtype:
                raise UsageError(f"key {name!r} has dtype {key.dtype}, not {dtype}")
        return key

    @property
    def _is_async(self) -> bool:
        return "_async" in self._type

    def _is_cut(self, key: Key) -> bool:
        return not self._is_async and key.nbytes > self._node.settings.slice_elems * key.itemsize

    def _begin_push(self, name: Any) -> Tuple[int, bytes]:
        """The training step that a push of ``name`` belongs to, and what changed before it."""
        if self._updater is None and self._is_async:
            raise UsageError(
                f"push of key {name!r}: a store of type {self._type!r} updates on its servers and"
                " has no optimizer: call set_optimizer first (Trainer: update_on_kvstore=True)"
            )
        extra = b"" if self._updater is None else self._updater.changes.since_last_push(name)
        count = self._pushes[name] = self._pushes.get(name, 0) + 1
        self._step = max(self._step, count)
        return self._step, extra
