"""Questions to all ranks, through a store of their own.  Every rank must ask the same ones."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import mxnet as mx
import numpy as np

from p3.errors import UsageError
from p3.store import P3KVStore

_FIRST = 2**30  # the answer is waited for, so it goes before all gradients


class Agreement:
    """A Trainer's or Module's line to its peers.  Each call blocks until all ranks made it.

    Raises ``MXNetError`` if the job fails meanwhile.  For the training thread.
    """

    def __init__(self, store: P3KVStore) -> None:
        """``store``: whose ranks are asked; its own keys are not touched."""
        self.rank, self._num_workers = store.rank, store.num_workers
        self._store: Optional[P3KVStore] = P3KVStore("dist_sync_p3") if self.any_peers else None
        self._told = 0

    @property
    def any_peers(self) -> bool:
        """Whether there is anybody to ask."""
        return self._num_workers > 1

    def rank_0s(self, texts: Sequence[str]) -> List[str]:
        """The texts that rank 0 has passed; they may be any but hold no line feeds."""
        if self._store is None:
            return list(texts)
        data = np.frombuffer("\n".join(texts).encode(), np.uint8)
        size = self._broadcast(np.array([len(data)], np.int32))
        if self.rank != 0:
            data = np.zeros(size[0], np.uint8)
        told: bytes = self._broadcast(data).tobytes()
        return told.decode().split("\n")

    def total(self, numbers: Sequence[int]) -> List[int]:
        """The sums over all ranks, number by number."""
        if self._store is None:
            return list(numbers)
        key = f"total of {len(numbers)}"
        values = mx.nd.array(numbers, dtype=np.int32)
        self._store.init(key, values)  # from the second time on nothing happens
        self._store.pushpull(key, values, out=values, priority=_FIRST)
        sums: List[int] = values.asnumpy().tolist()
        return sums

    def check(self, what: str, test: Callable[[], Any]) -> Any:
        """``test()``'s result; raises ``UsageError`` on every rank if one rank's test does.

        ``what``: the call at fault, for the message.
        """
        problem, result = None, None
        try:
            result = test()
        except UsageError as error:
            problem = error
        failed = self.total([int(problem is not None and r == self.rank) for r in self._ranks])
        if problem is not None:
            raise UsageError(f"{what}: rank {self.rank}: {problem}") from problem
        if any(failed):
            raise UsageError(f"{what}: refused on rank {failed.index(1)}, which says why")
        return result

    @property
    def _ranks(self) -> range:
        return range(self._num_workers)

    def _broadcast(self, value: Any) -> Any:
        assert self._store is not None
        array = mx.nd.array(value, dtype=value.dtype)
        self._store.broadcast(f"text {self._told}", array, out=array, priority=_FIRST)
        self._told += 1
        return array.asnumpy()
