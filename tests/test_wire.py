"""Data messages: what goes in comes out, and no bytes whatever do more than be refused."""

from __future__ import annotations

import random
import struct

import pytest

from p3.wire import (
    DONE,
    GREETING,
    INIT,
    INLINE_BYTES,
    PULL,
    PUSH,
    RECORD_BYTES,
    WANT_VALUE,
    Item,
    Record,
    WireError,
    decode,
    decode_credit,
    encode,
    encode_credit,
    size_of,
)

PREFIX_BYTES = 8


def item(payload=b"", extra=b"", **fields):
    values = {"key": 1, "slice": 2, "round": 3, "step": 4, "priority": -5, "op": PUSH, **fields}
    return Item(Record(**values), extra, payload)


def noise(chance, size):
    return bytes(chance.getrandbits(8) for _ in range(size))


def plain(items):
    """What was said, without the lengths, which ``encode`` fills in."""
    return [(i.record[:7], bytes(i.extra), bytes(i.payload)) for i in items]


@pytest.mark.parametrize(
    "size", [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 5 * INLINE_BYTES]
)
def test_a_payload_of_any_size_comes_back(size):
    payload = noise(random.Random(size), size)
    sent = [item(payload, b'{"lr": 1}')]
    assert plain(decode(encode(sent))) == plain(sent)


def test_small_and_large_payloads_travel_together_in_order():
    large = bytes(range(256)) * 100
    sent = [
        item(b"small", b"x"),
        item(large, op=INIT, slice=7),
        item(b"", b"only extra", op=PULL),
        item(large[1:], flags=WANT_VALUE),
        item(b"last", op=DONE, key=2**32 - 1, priority=-(2**31)),
    ]
    frames = encode(sent)
    assert len(frames) == 3  # the large ones have frames of their own
    assert plain(decode(frames)) == plain(sent)
    assert size_of(frames) == PREFIX_BYTES + 5 * RECORD_BYTES + sum(
        len(i.extra) + len(i.payload) for i in sent
    )


def test_a_large_payload_is_neither_copied_when_sent_nor_when_received():
    memory = bytearray(INLINE_BYTES + 1)
    frames = encode([item(memoryview(memory))])
    received = decode(frames)[0].payload
    memory[-1] = 7
    assert received[-1] == 7


def test_the_largest_values_of_every_field_come_back():
    top = {"key": 2**32 - 1, "slice": 2**32 - 1, "round": 2**32 - 1, "step": 2**32 - 1}
    sent = [item(priority=2**31 - 1, op=255, flags=255, **top)]
    assert plain(decode(encode(sent))) == plain(sent)


def test_a_greeting_is_a_message_without_items():
    assert decode(GREETING) == []


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"p3\x01\x00\x00\x00"],
        [b"p4\x01\x00\x00\x00\x00\x00"],
        [b"p3\x02\x00\x00\x00\x00\x00"],
        [b"p3\x01\x00\x01\x00\x00\x00"],
        [b"p3\x01\x00\xff\xff\xff\xff" + bytes(64)],
        [GREETING[0] + b"left over"],
        [GREETING[0], b"a frame that nobody announced"],
    ],
)
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(WireError):
        decode(frames)


def test_a_payload_of_another_length_than_announced_is_refused():
    head, payload = encode([item(bytes(INLINE_BYTES + 1))])
    for wrong in ([head], [head, payload[1:]], [head, payload, payload], [head, b""]):
        with pytest.raises(WireError):
            decode(wrong)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, INLINE_BYTES])
def test_a_huge_announced_length_reserves_nothing(length):
    head = bytearray(encode([item(b"four")])[0])
    head[PREFIX_BYTES + 24 : PREFIX_BYTES + 32] = struct.pack("<Q", length)
    with pytest.raises(WireError):
        decode([bytes(head)])


def test_random_frames_raise_nothing_but_wire_errors():
    chance = random.Random(1)
    for _ in range(3000):
        count = chance.randrange(4)
        frames = [noise(chance, chance.randrange(120)) for _ in range(count)]
        if frames and chance.random() < 0.8:  # past the first checks
            frames[0] = b"p3\x01\x00" + struct.pack("<I", chance.randrange(4)) + frames[0]
        refused_or_understood(frames)


def test_damaged_messages_raise_nothing_but_wire_errors():
    chance = random.Random(2)
    good = encode([item(b"abc", b"de"), item(bytes(INLINE_BYTES + 1)), item(b"", b"f")])
    for _ in range(3000):
        frames = [bytearray(frame) for frame in good]
        for _ in range(chance.randrange(1, 4)):
            frame = chance.choice(frames)
            frame[chance.randrange(min(len(frame), 120))] = chance.randrange(256)
        if chance.random() < 0.3:
            del frames[0][chance.randrange(len(frames[0])) :]
        refused_or_understood(frames)


def refused_or_understood(frames):
    try:
        items = decode(frames)
    except WireError:
        return
    assert plain(decode(encode(items))) == plain(items)


@pytest.mark.parametrize("nbytes", [0, 1, 2**32, 2**64 - 1])
def test_credit_comes_back(nbytes):
    assert decode_credit(encode_credit(nbytes)) == nbytes


@pytest.mark.parametrize("frame", [b"", b"1234567", b"123456789", bytes(1000)])
def test_what_is_no_credit_is_refused(frame):
    with pytest.raises(WireError):
        decode_credit(frame)
