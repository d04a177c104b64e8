"""The server: ``shard.py`` decides, ``updater.py`` applies optimizers, ``process.py`` loops."""

from __future__ import annotations

from p3 import config
from p3.config import Settings


def serve(settings: Settings) -> int:
    """Serve one shard until the job ends; returns the process's exit code.  Blocks."""
    config.use_naive_engine()  # operations are complete when they return: no engine threads
    from p3.server.process import serve as run

    return run(settings)
