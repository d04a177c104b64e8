"""MXNet's dependency engine, joined through ctypes: a store's operation is the engine's.

``submit`` enqueues an operation that reads some arrays and writes others.  The engine calls
``start`` on a thread of its own when all of them are free, and holds them until ``complete``:
later writes to what is read, and reads of what is written, wait.  So a script may overwrite or
delete an array it pushed, and the forward pass of a layer starts when its weight has come.

``complete(error)`` may be called from any thread, once.  With an error, whoever reads an
array that the operation writes gets ``MXNetError`` with that text: once, as MXNet forgets an
array's error when it has raised it.  Where an array of the operation carries such an error
already, the engine passes it on and never calls ``start``; then ``skipped`` is called.  Under
NaiveEngine, which knows no errors and finishes each operation before it returns, ``submit``
waits and raises the error itself.

What is relied on of MXNet 1.9.1 beyond its C API:

- an operation's end is a struct of three pointers, ``{callback, engine, operation}``, and
  ``callback(engine, operation, error)`` ends it (``include/mxnet/engine.h``);
- ``error`` points to a ``dmlc::Error``, which is a ``std::runtime_error`` and nothing more.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import mxnet as mx

from p3 import config
from p3.errors import InternalError
from p3.ndarray import chunk, make_plain, quick

_StartProc = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DeleteProc = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_EndProc = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_ThreePointers = ctypes.c_void_p * 3
_CPU = (ctypes.c_int32 * 2)(1, 0)  # {device type, device id}
#: FnProperty::kCPUPrioritized: threads of their own, most urgent first, so that waiting for
#: the interpreter lock in ``start`` never holds up the network's own operators
_PRIORITIZED = ctypes.c_int(3)

NAIVE = config.naive_engine()
#: enqueueing waits for nobody and keeps the interpreter lock; but NaiveEngine waits in it for
#: the end of the operation, which comes from another thread
_library = mx.base._LIB if NAIVE else quick


class Operation:
    """One operation of the engine's; made by ``submit``."""

    def __init__(
        self,
        start: Callable[[Operation], None],
        skipped: Callable[[str], None],
        keep: List[Any],
    ) -> None:
        self._start, self._skipped = start, skipped
        self._keep: Optional[List[Any]] = keep  # arrays, so that their memory stays
        self._end: Optional[List[int]] = None
        self.error: Optional[str] = None

    def complete(self, error: Optional[str] = None) -> None:
        """End the operation, with an error for the readers of what it writes, if any."""
        if self._end is None:
            raise InternalError("an operation was completed before it started, or twice")
        (callback, engine, operation), self._end = self._end, None
        self.error = error
        self._keep = None
        _started_operations.discard(self)
        _end_procs.get(callback)(engine, operation, None if error is None else _dmlc_error(error))


class _EndProcs(Dict[int, Any]):
    """Function objects by address: the engine has one or two."""

    def get(self, address: int, default: Any = None) -> Any:
        if address not in self:
            self[address] = _EndProc(address)
        return self[address]


_end_procs = _EndProcs()
_pending: Dict[int, Operation] = {}  # enqueued, not yet started
_started_operations: Set[Operation] = set()
_numbers = itertools.count(1)


def submit(
    start: Callable[[Operation], None],
    skipped: Callable[[str], None],
    reads: Sequence[Any],
    writes: Sequence[Any],
    priority: int,
    name: bytes,
) -> None:
    """Enqueue an operation on CPU arrays; returns at once (NaiveEngine excepted).

    ``start(operation)`` must not block; it, or any thread later, calls ``complete``.
    ``skipped(reason)`` is called instead if an array carries an error already, and after a
    ``start`` that raised.
    ``priority`` orders operations that are ready.  Thread-safe as MXNet's own calls are.
    """
    written = list({chunk(array): array for array in writes}.values())
    chunks = {chunk(array) for array in written}
    read = list({chunk(a): a for a in reads if chunk(a) not in chunks}.values())
    operation = Operation(start, skipped, [*reads, *writes])
    number = next(_numbers)
    _pending[number] = operation
    for array in read:
        make_plain(array)
    mx.base.check_call(
        _library.MXEnginePushAsyncND(
            _on_start,
            ctypes.c_void_p(number),
            _on_delete,
            _CPU,
            _handles(read),
            len(read),
            _handles(written),
            len(written),
            ctypes.byref(_PRIORITIZED),
            ctypes.c_int(max(-(2**31), min(priority, 2**31 - 1))),
            name,
            ctypes.c_bool(False),
        )
    )
    if NAIVE and operation.error is not None:
        raise mx.base.MXNetError(operation.error)


def pending() -> bool:
    """Whether operations of ``submit`` have not ended yet."""
    return bool(_pending or _started_operations)


def wait_all() -> None:
    """Block until every operation of MXNet's engine has ended; errors stay with their arrays."""
    try:
        mx.nd.waitall()
    except mx.base.MXNetError:
        pass  # whoever uses the key again is told


def _started(_context: int, end: int, number: int) -> None:
    """The engine's call when all arrays are free; an exception here would be lost."""
    operation = _pending.pop(number)
    operation._end = list(_ThreePointers.from_address(end))
    _started_operations.add(operation)
    try:
        operation._start(operation)
    except BaseException as error:  # noqa: BLE001  # ctypes would only print it
        if operation._end is not None:
            reason = f"{type(error).__name__}: {error}"
            operation.complete(reason)
            operation._skipped(reason)


def _deleted(number: int) -> None:
    """The engine's call when it forgets an operation, started or not."""
    operation = _pending.pop(number, None)
    if operation is not None:
        operation._skipped("could not be computed")


_on_start = _StartProc(_started)
_on_delete = _DeleteProc(_deleted)


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[array.handle for array in arrays])


_cpp = ctypes.CDLL("libstdc++.so.6")
_errors: List[Any] = []  # kept for ever: few, and the engine may still refer to them
_errors_lock = threading.Lock()


def _dmlc_error(text: str) -> int:
    memory = ctypes.create_string_buffer(64)
    _cpp._ZNSt13runtime_errorC1EPKc(ctypes.byref(memory), ctypes.c_char_p(text.encode()))
    with _errors_lock:
        _errors.append(memory)
    return ctypes.addressof(memory)
