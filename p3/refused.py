"""Calls of MXNet's stores that a script may make and p3 answers without a server's help.

What cannot be is refused on the caller, with the reason and what to do instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import mxnet as mx

from p3.errors import UsageError


class NativeCalls(mx.kvstore.KVStore):  # type: ignore[misc]
    """The part of a native store's surface that means something else in p3, or nothing."""

    @property
    def handle(self) -> NoReturn:
        """Refused, as ``AttributeError``: a native store's handle, for MXNet's C API."""
        raise AttributeError(
            "p3's store has no handle for MXNet's C API. To profile servers, look at their own"
            " processes: mx.profiler.set_kvstore_handle is for native stores"
        )

    def num_dead_node(self, node_id: int = 0, timeout: int = 60) -> int:
        """0: a job whose process is dead has failed, and every call of it raises."""
        self.check_alive()
        return 0

    get_num_dead_node = num_dead_node

    def set_barrier_before_exit(self, barrier_before_exit: bool = True) -> None:
        """Nothing to set: a worker's exit waits for its own pushes, never for other ranks."""
        self.check_alive()

    def set_updater(self, updater: Any) -> NoReturn:
        """Refused: a function cannot be run on the servers."""
        raise UsageError(
            f"set_updater({updater!r}): p3's servers apply optimizers, not functions of yours. Make"
            " it a subclass of mx.optimizer.Optimizer in a module that P3_ALLOW_OPTIMIZERS names,"
            " and pass that to set_optimizer; or create no optimizer here, pull the sums and"
            " update on the workers"
        )

    _set_updater = set_updater

    def send_command_to_servers(self, head: int, body: str) -> NoReturn:
        """Refused: p3's servers take no commands of a script's."""
        raise UsageError(
            f"send_command_to_servers({head!r}, ...): p3's servers take no commands of your own;"
            " optimizers go by set_optimizer, their states by load_optimizer_states"
        )

    _send_command_to_servers = send_command_to_servers

    def check_alive(self) -> None:
        """Raise if the job has failed or this process is not the store's."""
        raise NotImplementedError
