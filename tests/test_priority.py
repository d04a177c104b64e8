"""The ordering rule: urgent first, first come first served among equals, in every situation."""

from __future__ import annotations

import random

import pytest

from p3.credit import Window
from p3.priority import Outbox
from p3.wire import PUSH, RECORD_BYTES, Item, Record

MESSAGE = 1000
A, B = b"a", b"b"


class Clock:
    """An outbox over links whose credit the test gives back by hand."""

    def __init__(self, window_bytes=0, peers=(A,)):
        self.window = Window(MESSAGE, window_bytes)
        self.outbox = Outbox(self.window, MESSAGE)
        for peer in peers:
            self.outbox.add_peer(peer)

    def put(self, name, priority=0, nbytes=MESSAGE, peer=A):
        """``nbytes``: what the item counts for, its record included."""
        payload = bytes(nbytes - RECORD_BYTES)
        self.outbox.put(peer, Item(Record(name, 0, 0, 0, priority, PUSH), b"", payload))

    def send(self):
        """The names in the next message, which is in flight from now on."""
        taken = self.outbox.take()
        if taken is None:
            return None
        peer, items = taken
        nbytes = sum(RECORD_BYTES + len(item.payload) for item in items)
        self.window.sent(peer, nbytes, 0.0)
        return [item.record.key for item in items]

    def send_all(self):
        """Names in the order in which they leave when there is always credit."""
        order = []
        while True:
            taken = self.outbox.take()
            if taken is None:
                return order
            order += [item.record.key for item in taken[1]]


def test_the_most_urgent_goes_first_whenever_it_came():
    clock = Clock()
    for name, priority in [(1, -3), (2, 0), (3, -1), (4, 7), (5, -10)]:
        clock.put(name, priority)
    assert clock.send_all() == [4, 2, 3, 1, 5]


def test_equals_go_in_the_order_in_which_they_came():
    clock = Clock()
    for name in range(50):
        clock.put(name)
    assert clock.send_all() == list(range(50))


def test_any_sequence_leaves_by_priority_and_then_by_arrival():
    chance = random.Random(3)
    for _ in range(50):
        clock = Clock(peers=(A, B))
        arrivals = [(-chance.randrange(5), name) for name in range(chance.randrange(30))]
        for negative, name in arrivals:
            clock.put(name, -negative, peer=chance.choice((A, B)))
        assert clock.send_all() == [name for _, name in sorted(arrivals)]


def test_an_urgent_item_overtakes_what_waits_but_not_what_has_left():
    clock = Clock(window_bytes=MESSAGE)
    for name in (1, 2, 3):
        clock.put(name, -10)
    assert clock.send() == [1]
    clock.put(9, 0)
    assert clock.send() is None  # no credit
    clock.window.credited(A, MESSAGE, 1.0)
    assert clock.send() == [9]
    clock.window.credited(A, MESSAGE, 2.0)
    assert clock.send() == [2]


def test_an_urgent_item_without_room_is_not_overtaken_by_a_smaller_one():
    clock = Clock(window_bytes=1500)
    clock.put(1)
    assert clock.send() == [1]
    clock.put(2, priority=5)
    clock.put(3, priority=0, nbytes=100)  # it alone would fit
    assert clock.send() is None
    clock.window.credited(A, MESSAGE, 1.0)
    assert clock.send() == [2]
    assert clock.send() == [3]


def test_a_full_link_does_not_hold_up_another():
    clock = Clock(window_bytes=4 * MESSAGE, peers=(A, B))
    for name in (1, 2, 3, 4):
        clock.put(name, priority=5, peer=A)
    clock.put(8, priority=0, peer=B)
    assert clock.send() == [1]
    assert clock.send() == [2]  # half the window, as much as one of several links may hold
    assert clock.send() == [8]
    assert clock.send() is None
    clock.window.credited(A, MESSAGE, 1.0)
    assert clock.send() == [3]


def test_small_items_to_one_peer_share_a_message_up_to_its_size():
    clock = Clock(window_bytes=100 * MESSAGE, peers=(A, B))
    for name in range(25):
        clock.put(name, nbytes=100, peer=A)
    clock.put(99, nbytes=100, peer=B)
    messages = [clock.send() for _ in range(4)]
    assert messages == [list(range(10)), list(range(10, 20)), list(range(20, 25)), [99]]


def test_a_message_is_filled_by_priority():
    clock = Clock(window_bytes=2 * MESSAGE)
    clock.put(1, priority=-1, nbytes=400)
    clock.put(2, priority=3, nbytes=400)
    clock.put(3, priority=2, nbytes=400)
    assert clock.send() == [2, 3]
    assert clock.send() == [1]


def test_an_item_larger_than_a_message_goes_alone():
    clock = Clock()
    clock.put(1, nbytes=5 * MESSAGE)
    clock.put(2, nbytes=100)
    assert clock.send() == [1]


def test_payloads_are_never_compared():
    clock = Clock()
    for name in range(3):
        clock.put(name, nbytes=100)
    clock.outbox.put(A, Item(Record(9, 0, 0, 0, 0, PUSH), b"", memoryview(b"xy")))
    assert clock.send() == [0, 1, 2, 9]


def test_what_waits_is_counted():
    clock = Clock(window_bytes=MESSAGE)
    assert len(clock.outbox) == 0
    clock.put(1)
    clock.put(2, nbytes=300)
    assert len(clock.outbox) == 2
    assert clock.outbox.waiting_bytes == MESSAGE + 300
    clock.send()
    assert len(clock.outbox) == 1
    assert clock.outbox.waiting_bytes == 300
    assert "1 items, 300 bytes" in repr(clock.outbox)


def test_nothing_waits_for_a_peer_that_is_not_there():
    with pytest.raises(KeyError):
        Clock().put(1, peer=b"nobody")
