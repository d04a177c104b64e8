"""Messages of the control plane: a JSON object and a blob of bytes, two frames.

    frame 0   UTF-8 JSON object with a text field "kind"; the other fields depend on it
    frame 1   bytes, often empty (a pickled optimizer, optimizer states)

A peer may send anything, so the fields are read through the functions below, which raise
``Malformed`` instead of letting a wrong type travel on.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from p3 import __version__

VERSION = __version__  #: all processes of a job run the same p3
Body = Dict[str, Any]
Key = Union[int, str]  #: as scripts name keys; 3 and "3" are two keys


class Malformed(Exception):
    """A message that no correct peer would send; the text says what is wrong with it."""


class Send(NamedTuple):
    """An instruction: send this message to ``peer``."""

    peer: bytes
    body: Body
    blob: bytes = b""


def encode(body: Body, blob: bytes = b"") -> List[bytes]:
    """The frames of a message.  Raises ``TypeError`` if ``body`` is not plain JSON data."""
    return [json.dumps(body, separators=(",", ":")).encode(), blob]


def decode(frames: Sequence[Any]) -> Tuple[Body, bytes]:
    """Body and blob of a message's frames.  Raises ``Malformed``."""
    if len(frames) != 2:
        raise Malformed(f"{len(frames)} frames instead of 2")
    try:
        body = json.loads(bytes(frames[0]).decode())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({type(error).__name__})") from None
    if not isinstance(body, dict):
        raise Malformed(f"a {type(body).__name__} instead of an object")
    return body, bytes(frames[1])


def join_blobs(blobs: Sequence[bytes]) -> Tuple[List[int], bytes]:
    """Several blobs as one, and the size in bytes of each."""
    return [len(blob) for blob in blobs], b"".join(blobs)


def split_blobs(sizes_bytes: Sequence[int], joined: bytes) -> List[bytes]:
    """The blobs that ``join_blobs`` joined.  Raises ``Malformed`` if the sizes do not add up."""
    if sum(sizes_bytes) != len(joined) or any(size < 0 for size in sizes_bytes):
        raise Malformed(f"blobs of {list(sizes_bytes)} bytes in {len(joined)} bytes")
    blobs, start = [], 0
    for size in sizes_bytes:
        blobs.append(joined[start : start + size])
        start += size
    return blobs


def get_int(body: Body, name: str, least: int = 0) -> int:
    """A whole number of at least ``least`` (true and false are none)."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(name, value, f"a whole number of at least {least}")
    return value


def get_str(body: Body, name: str) -> str:
    """A text."""
    value = body.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def get_bool(body: Body, name: str) -> bool:
    """True or false."""
    value = body.get(name)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def get_dict(body: Body, name: str) -> Body:
    """An object."""
    value = body.get(name)
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def get_dicts(body: Body, name: str) -> List[Body]:
    """A list of objects."""
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _wrong(name, value, "a list of objects")
    return value


def get_key(body: Body, name: str) -> Key:
    """A key (or a space): a whole number, negative too, or a text."""
    value = body.get(name)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise _wrong(name, value, "a whole number or a text")
    return value


def get_keys(body: Body, name: str) -> List[Key]:
    """A list of keys."""
    value = body.get(name)
    if not isinstance(value, list) or not all(
        isinstance(item, (int, str)) and not isinstance(item, bool) for item in value
    ):
        raise _wrong(name, value, "a list of whole numbers and texts")
    return value


def get_sizes(body: Body, name: str) -> List[int]:
    """A list of whole numbers of at least 0 (a shape, sizes of blobs)."""
    value = body.get(name)
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    ):
        raise _wrong(name, value, "a list of whole numbers of at least 0")
    return value


def new_token() -> bytes:
    """16 random bytes, the first not zero: what a peer is admitted by, and called."""
    token = os.urandom(16)
    return token if token[0] else new_token()


def shown(value: object, most_chars: int = 80) -> str:
    """``value`` on one short line, safe to print whatever a peer put into it."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # a number of too many digits; nested too deep
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= most_chars else text[: most_chars - 3] + "..."


def _wrong(name: str, value: object, expected: str) -> Malformed:
    return Malformed(f"{name}={shown(value)}: must be {expected}")
