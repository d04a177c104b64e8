"""Data messages: what a worker and a server write on the DATA and CREDIT channels.

A DATA message carries one or several records, each about one slice.  Frame 0, little-endian:

    0      2         3        4        8                             8 + 32 n
    | "p3" | version | spare  | n: u32 | n records of 32 bytes each  | extras and small payloads |

and a record:

    key u32 | slice u32 | round u32 | step u32 | priority i32
    | op u8 | flags u8 | extra u16 | payload u64

After the records, in their order, each one's extra bytes (``extra`` long, JSON of changed
optimizer attributes) and then its payload, if that is at most ``INLINE_BYTES``.  A larger
payload is a frame of its own; those follow frame 0 in the order of their records.  A message
with no record is a greeting, answered by another.  A CREDIT message is one u64: bytes taken.

``round`` counts a worker's pushes of the key from 1; ``step`` counts the training step the
push belongs to, for learning-rate schedules.
"""

from __future__ import annotations

import struct
from typing import List, NamedTuple, Sequence, Tuple

from p3.transport.interface import Buffer

VERSION = 1
#: payloads up to this many bytes share frame 0; larger ones are sent without a copy
INLINE_BYTES = 16_384

INIT, PUSH, PULL = 1, 2, 3  #: worker to server
VALUE, DONE, ERROR, STALL = 4, 5, 6, 7  #: server to worker; the last two with a text in UTF-8

WANT_VALUE = 1  #: flag of PUSH: answer with the updated value, not only DONE
REPLACE = 2  #: flag of INIT: also if the slice has a value already
ROWS = 4  #: flag of PUSH and PULL: only some rows of the key, as in ``rows.py``
COMPRESSED = 8  #: flag of PUSH: the payload is one of ``compression.py``

_PREFIX = struct.Struct("<2sBxI")
_RECORD = struct.Struct("<IIIIiBBHQ")
_CREDIT = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size


class Record(NamedTuple):
    """What is said about one slice; see the module's text for the fields."""

    key: int
    slice: int
    round: int
    step: int
    priority: int
    op: int
    flags: int = 0
    extra_bytes: int = 0
    payload_bytes: int = 0


class Item(NamedTuple):
    """A record with its extra bytes and its payload (sent without a copy where large)."""

    record: Record
    extra: bytes
    payload: Buffer


class WireError(ValueError):
    """Bytes that are not a message of ours; the text says what is wrong."""


GREETING: Tuple[bytes] = (_PREFIX.pack(b"p3", VERSION, 0),)


def encode(items: Sequence[Item]) -> List[Buffer]:
    """The frames of one DATA message; large payloads are in it as they are, uncopied."""
    parts: List[Buffer] = [_PREFIX.pack(b"p3", VERSION, len(items))]
    inline: List[Buffer] = []
    frames: List[Buffer] = [b""]
    for record, extra, payload in items:
        size = len(payload)
        parts.append(_RECORD.pack(*record[:7], len(extra), size))
        if extra:
            inline.append(extra)
        if size > INLINE_BYTES:
            frames.append(payload)
        elif size:
            inline.append(payload)
    frames[0] = b"".join(parts + inline)
    return frames


def decode(frames: Sequence[Buffer]) -> List[Item]:
    """The items of a message; payloads are views of the frames.  Raises ``WireError``."""
    if not frames or len(frames[0]) < _PREFIX.size:
        raise WireError("shorter than the prefix")
    head = memoryview(frames[0])
    magic, version, count = _PREFIX.unpack_from(head)
    if magic != b"p3" or version != VERSION:
        raise WireError(f"not version {VERSION} of p3's messages: {bytes(head[:4])!r}")
    offset = _PREFIX.size + count * _RECORD.size
    if offset > len(head):
        raise WireError(f"{count} records do not fit into {len(head)} bytes")
    items: List[Item] = []
    large = iter(frames[1:])
    for fields in _RECORD.iter_unpack(head[_PREFIX.size : offset]):
        extra, offset = _take(head, offset, fields[7])
        size = fields[8]
        if size > INLINE_BYTES:
            payload = memoryview(next(large, b""))
            if len(payload) != size:
                raise WireError(f"a payload of {len(payload)} bytes where {size} were announced")
        else:
            payload, offset = _take(head, offset, size)
        items.append(Item(Record._make(fields), bytes(extra), payload))
    if offset != len(head) or next(large, None) is not None:
        raise WireError("bytes left over after the last record")
    return items


def encode_credit(nbytes: int) -> bytes:
    """A CREDIT message: the sender has taken ``nbytes`` more bytes of DATA messages."""
    return _CREDIT.pack(nbytes)


def decode_credit(frame: Buffer) -> int:
    """Bytes taken; raises ``WireError``."""
    if len(frame) != _CREDIT.size:
        raise WireError(f"a credit of {len(frame)} bytes")
    nbytes: int = _CREDIT.unpack(frame)[0]
    return nbytes


def size_of(frames: Sequence[Buffer]) -> int:
    """Bytes of a message, as both sides count them for credit."""
    return sum(map(len, frames))


def _take(head: memoryview, offset: int, size: int) -> Tuple[memoryview, int]:
    if offset + size > len(head):
        raise WireError(f"{size} bytes announced, {len(head) - offset} left")
    return head[offset : offset + size], offset + size
