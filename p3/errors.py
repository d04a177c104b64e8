"""Everything p3 raises on purpose, sorted by whose fault it is.

``UsageError``   yours: a wrong name, shape, setting or call; nothing was sent.
``PeerError``    a peer's: another process of the job failed, vanished or disagreed.
``InternalError``  ours: p3 contradicted itself; please report it.

All are ``P3Error``.  ``UsageError`` is a ``ValueError`` too.  Once MXNet is loaded all are its
``MXNetError`` as well, which is what scripts written for its own stores catch.
"""

from __future__ import annotations

from typing import Optional, Type


class _WithoutMXNet(RuntimeError):
    """In the place of ``MXNetError``, itself a ``RuntimeError``, until that is there."""


class P3Error(_WithoutMXNet):
    """Base of every error that p3 raises on purpose."""


def count_as(mxnet_error: Type[RuntimeError]) -> None:
    """From now on every ``P3Error`` is an ``mxnet_error``.  Idempotent."""
    P3Error.__bases__ = (mxnet_error,)


class UsageError(P3Error, ValueError):
    """The caller asked for something impossible; the message says what to do instead."""


class UnknownKeyError(UsageError, KeyError):
    """A key was pushed or pulled that this worker never initialised."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr, quotes and all


class PeerError(P3Error):
    """Another process of the job failed, vanished or disagrees with this one.

    ``role``, ``rank`` and ``host`` name it where known (``None`` where not).
    """

    def __init__(
        self,
        message: str,
        role: Optional[str] = None,
        rank: Optional[int] = None,
        host: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.role, self.rank, self.host = role, rank, host


class InternalError(P3Error):
    """p3 contradicted itself; the message carries the evidence."""
