"""Gradient compression: pushes in fewer bits, with what was left out added to the next push.

    2bit    each value +threshold, -threshold or 0: 16 times smaller
    1bit    each value +1 or -1: 32 times smaller
    fp16    each value in half precision: half the size; nothing is kept

2bit is MXNet 1.9.1's (``quantize_2bit`` in ``src/kvstore/gradient_compression-inl.h``) and
1bit that of MXNet's master branch: ``residual += gradient``; where it is beyond the threshold
a code is sent, and the residual is reduced by what the code stands for.  Only pushes are
compressed; first values and results never are.

A compressed slice says how it was made, so servers keep nothing about it:

    kind u8 | 3 spare | threshold f32 | codes

Pure: arrays in, bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from p3.errors import UsageError

Array = Any  # numpy.ndarray
_HEADER = struct.Struct("<B3xf")
_KINDS = {"2bit": 1, "1bit": 2, "fp16": 3}
_TWO_BIT, _ONE_BIT, _HALF = _KINDS.values()


class Compression(NamedTuple):
    """How a store's pushes are compressed."""

    kind: int
    threshold: float

    @property
    def keeps_residual(self) -> bool:
        """Whether what a push leaves out is added to the next one."""
        return self.kind != _HALF


def parse(params: Any) -> Optional[Compression]:
    """The compression that ``set_gradient_compression`` is asked for; ``None`` for "none".

    ``params``: ``type`` and, for 1bit and 2bit, ``threshold`` (default 0.5).  Raises
    ``UsageError`` for anything else.
    """
    where = f"set_gradient_compression({params!r})"
    if not isinstance(params, Mapping) or "type" not in params:
        raise UsageError(f"{where}: a dict with a type is needed, such as {{'type': '2bit'}}")
    unknown = set(params) - {"type", "threshold"}
    if unknown:
        raise UsageError(f"{where}: {sorted(unknown)} is unknown; there are type and threshold")
    kind = params["type"]
    if kind == "none":
        return None
    if kind not in _KINDS:
        raise UsageError(f"{where}: type must be one of {', '.join(_KINDS)}, none")
    try:
        threshold = float(params.get("threshold", 0.5))
    except (TypeError, ValueError):
        threshold = 0.0
    if not 0 < threshold < float("inf"):
        raise UsageError(f"{where}: threshold must be a number above 0")
    return Compression(_KINDS[kind], threshold)


def encode(compression: Compression, gradient: Array, residual: Optional[Array]) -> bytes:
    """A flat float32 slice, compressed; ``residual``, as long, is updated in place."""
    header = _HEADER.pack(compression.kind, compression.threshold)
    if compression.kind == _HALF:
        half: bytes = gradient.astype(np.float16).tobytes()
        return header + half
    assert residual is not None
    threshold = np.float32(compression.threshold)
    residual += gradient
    if compression.kind == _ONE_BIT:
        above = residual > threshold
        residual -= np.where(above, np.float32(1), np.float32(-1))
        return header + np.packbits(above).tobytes()
    above = residual >= threshold
    sent = above | (residual <= -threshold)
    residual[above] -= threshold
    residual[sent & ~above] += threshold
    return header + np.packbits(np.stack((sent, above), axis=1)).tobytes()


def decode(payload: Any, size: int) -> Array:
    """The ``size`` float32 elements of a compressed slice.  Raises ``ValueError``."""
    if len(payload) < _HEADER.size:
        raise ValueError(f"a compressed slice of {len(payload)} bytes")
    kind, threshold = _HEADER.unpack_from(payload)
    bits = {_TWO_BIT: 2, _ONE_BIT: 1, _HALF: 16}.get(kind)
    if bits is None or len(payload) - _HEADER.size != -(-size * bits // 8):
        raise ValueError(f"kind {kind}, {len(payload)} bytes for {size} compressed elements")
    codes = payload[_HEADER.size :]
    if kind == _HALF:
        return np.frombuffer(codes, np.float16).astype(np.float32)
    flags = np.unpackbits(np.frombuffer(codes, np.uint8), count=size * bits).reshape(size, bits)
    if kind == _ONE_BIT:
        return np.where(flags[:, 0], np.float32(1), np.float32(-1))
    value = np.float32(threshold)
    signed = np.where(flags[:, 1], value, -value)
    return np.where(flags[:, 0], signed, np.float32(0))
