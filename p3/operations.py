"""A request becomes an operation: of MXNet's engine, or, for row-sparse arrays, of a thread.

The engine begins a request when its arrays are free, and holds them until the request ends.
What is in a row-sparse array can only be seen by waiting for it (``sparse.py``), so such a push
takes a copy, which nobody else can change, and a background thread begins it.

Called by the training thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Optional, Sequence

import numpy as np

from p3 import engine, ndarray, sparse
from p3.errors import PeerError
from p3.node import Node
from p3.wire import ROWS
from p3.worker import PULL, Key, Request, Worker


class Operations:
    """The operations of one store."""

    def __init__(self, node: Node, worker: Worker) -> None:
        self._node, self._worker = node, worker

    def submit(self, request: Request, name: bytes, source: Any = None, target: Any = None) -> None:
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

    def push_rows(self, request: Request, values: Sequence[Any]) -> None:
        """Push row-sparse gradients; what is in them is seen on the background thread."""
        array = sparse.private(list(values))

        def begin() -> None:
            try:
                request.rows, content = sparse.contents(array)
            except Exception as error:  # noqa: BLE001  # on this thread nobody else would hear
                self._skip(request, f"could not be computed: {error}")
            else:
                source = memoryview(content.reshape(-1)).cast("B") if content.size else None
                self._worker.begin(request, lambda error: None, source)

        self._worker.enqueue(request)
        self._node.later(begin)

    def pull_rows(self, key: Key, rows: Any, priority: int) -> Any:
        """The given rows of the key's value, as a NumPy array.  Blocks."""
        values: Any = np.empty((len(rows), *key.shape[1:]), key.dtype)
        done: Future[Optional[str]] = Future()
        request = Request(key, PULL, priority, flags=ROWS, rows=rows)
        self._worker.enqueue(request)
        target = memoryview(values.reshape(-1)).cast("B") if values.size else None
        self._worker.begin(request, done.set_result, target=target)
        error = done.result()
        if error is not None:
            raise key.error or self._worker.error or PeerError(error)
        return values

    def _skip(self, request: Request, reason: str) -> None:
        """The engine did not begin the request: no rank can count on its key any more."""
        if request.op == PULL:  # of this rank's concern alone; whoever reads `out` is told
            self._worker.begin(request, lambda error: None)
            return
        what = f"rank {self._node.rank}: the array given to key {request.key.name!r}: {reason}"
        self._node.fail_key(request.key, what)
