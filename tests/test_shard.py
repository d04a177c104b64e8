"""The shard: records in, replies out, in every order that a network can bring about."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from p3.server.shard import Shard, assign
from p3.slicing import KeyEntry
from p3.wire import DONE, ERROR, INIT, PULL, PUSH, REPLACE, VALUE, WANT_VALUE, Item, Record

KEY = 7


def entry(elements=3, mode="sync", whole=False, shape=None, dtype="float32"):
    return KeyEntry(KEY, 0, "weight", shape or (elements,), dtype, mode, whole, 0)


def shard(key=None, workers=2, servers=1, slice_elems=8, apply=assign):
    made = Shard(0, workers, servers, slice_elems, apply)
    made.add_key(key or entry())
    return made


def item(op, values=(), number=0, dtype="float32", **fields):
    record = Record(KEY, number, 1, 1, fields.pop("priority", 0), op, **fields)
    return Item(record, b"", np.array(values, dtype).tobytes())


def said(replies, dtype="float32"):
    """``(rank, operation, values or text)`` of each reply."""
    return [(r.rank, r.item.record.op, content(r.item, dtype)) for r in replies]


def content(reply, dtype):
    if reply.record.op == ERROR:
        return bytes(reply.payload).decode()
    return np.frombuffer(reply.payload, dtype).tolist() if len(reply.payload) else []


def add_to_value(unit, pushes):
    """An optimizer whose result shows how often it was applied."""
    for push in pushes:
        unit.value += np.concatenate(push.parts)


def test_a_pull_after_init_gives_the_value():
    made = shard()
    assert said(made.handle(0, item(INIT, [1, 2, 3]))) == [(0, DONE, [])]
    assert said(made.handle(1, item(PULL))) == [(1, VALUE, [1, 2, 3])]


def test_a_pull_before_init_is_answered_when_it_comes():
    made = shard()
    assert made.handle(1, item(PULL)) == []
    assert said(made.handle(0, item(INIT, [1, 2, 3]))) == [(0, DONE, []), (1, VALUE, [1, 2, 3])]


def test_a_second_init_changes_nothing():
    made = shard()
    made.handle(0, item(INIT, [1, 2, 3]))
    assert said(made.handle(1, item(INIT, [9, 9, 9]))) == [(1, DONE, [])]
    assert said(made.handle(1, item(PULL))) == [(1, VALUE, [1, 2, 3])]


def test_a_round_answers_everybody_at_once_each_as_asked():
    made = shard()
    made.handle(0, item(INIT, [0, 0, 0]))
    assert made.handle(1, item(PUSH, [1, 2, 3])) == []
    replies = made.handle(0, item(PUSH, [10, 20, 30], flags=WANT_VALUE))
    assert said(replies) == [(0, VALUE, [11, 22, 33]), (1, DONE, [])]


def test_all_answers_of_a_round_have_the_priority_that_rank_0_gave():
    made = shard()
    made.handle(0, item(INIT, [0, 0, 0]))
    made.handle(1, item(PUSH, [1, 2, 3], priority=-1))
    replies = made.handle(0, item(PUSH, [1, 2, 3], priority=-5))
    assert [reply.item.record.priority for reply in replies] == [-5, -5]


def test_every_order_of_init_pushes_and_pulls_ends_the_same():
    events = [(0, item(INIT, [5])), (0, item(PUSH, [1])), (1, item(PUSH, [2])), (0, item(PULL))]
    for order in itertools.permutations(events):
        made = shard(entry(1), apply=add_to_value)
        replies = [reply for rank, event in order for reply in made.handle(rank, event)]
        assert sorted(op for _, op, _ in said(replies)) == sorted([DONE, DONE, DONE, VALUE])
        assert said(made.handle(1, item(PULL))) == [(1, VALUE, [8])]


def test_a_second_push_of_a_rank_waits_for_the_next_round():
    made = shard(entry(1))
    made.handle(0, item(INIT, [0]))
    assert made.handle(0, item(PUSH, [1], flags=WANT_VALUE)) == []
    assert made.handle(0, item(PUSH, [10], flags=WANT_VALUE)) == []
    assert said(made.handle(1, item(PUSH, [100])))[0] == (0, VALUE, [101])
    assert said(made.handle(1, item(PUSH, [1000])))[0] == (0, VALUE, [1010])


def test_slices_have_rounds_of_their_own():
    made = shard(entry(11))
    made.handle(0, item(INIT, [0] * 8))
    made.handle(0, item(INIT, [0] * 3, number=1))
    made.handle(0, item(PUSH, [1] * 8))
    assert said(made.handle(1, item(PUSH, [1] * 8))) == [(0, DONE, []), (1, DONE, [])]
    assert said(made.handle(0, item(PULL, number=1))) == [(0, VALUE, [0, 0, 0])]


def test_a_key_kept_whole_is_updated_once_when_all_its_slices_are_there():
    seen = []

    def apply(unit, pushes):
        seen.append((unit.whole, len(unit.value), [len(push.parts) for push in pushes]))
        assign(unit, pushes)

    made = shard(entry(11, whole=True), apply=apply)
    assert said(made.handle(0, item(INIT, [0] * 3, number=1))) == [(0, DONE, [])]
    made.handle(0, item(INIT, [0] * 8))
    for rank in (0, 1):
        made.handle(rank, item(PUSH, [1] * 3, number=1, flags=WANT_VALUE))
    assert made.handle(1, item(PUSH, [1] * 8, flags=WANT_VALUE)) == []
    replies = sorted(said(made.handle(0, item(PUSH, [1] * 8, flags=WANT_VALUE))))
    assert seen == [(True, 11, [2, 2])]
    assert replies == [
        (rank, VALUE, values) for rank in (0, 1) for values in ([2.0] * 3, [2.0] * 8)
    ]


def test_only_this_servers_slices_are_here():
    made = shard(entry(24), servers=2)
    assert [unit.name for unit in made.units(0)] == ["key 'weight' slice 0", "key 'weight' slice 2"]
    with pytest.raises(ValueError, match="no slice 1"):
        made.handle(0, item(INIT, [0] * 8, number=1))


def test_a_key_announced_twice_keeps_its_value():
    made = shard(entry(1))
    made.handle(0, item(INIT, [5]))
    made.add_key(entry(1))
    assert said(made.handle(0, item(PULL))) == [(0, VALUE, [5])]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_key_is_initialised_pushed_and_pulled_as_any_other(shape):
    made = shard(entry(shape=shape))
    assert said(made.handle(1, item(PULL))) == []
    assert said(made.handle(0, item(INIT))) == [(0, DONE, []), (1, VALUE, [])]
    made.handle(0, item(PUSH, flags=WANT_VALUE))
    assert said(made.handle(1, item(PUSH))) == [(0, VALUE, []), (1, DONE, [])]


def test_a_scalar_is_one_element():
    key = KeyEntry(KEY, 0, "loss", (), "float32", "sync", False, 0)
    made = shard(key)
    made.handle(0, item(INIT, [4]))
    assert said(made.handle(1, item(PULL))) == [(1, VALUE, [4])]


def test_asynchronous_pushes_are_applied_one_by_one():
    made = shard(entry(1, mode="async"), apply=add_to_value)
    made.handle(0, item(INIT, [0]))
    assert said(made.handle(1, item(PUSH, [1], flags=WANT_VALUE))) == [(1, VALUE, [1])]
    assert said(made.handle(1, item(PUSH, [2], flags=WANT_VALUE))) == [(1, VALUE, [3])]
    assert said(made.handle(0, item(PUSH, [4], flags=WANT_VALUE))) == [(0, VALUE, [7])]


def test_asynchronous_pushes_before_init_wait_for_it():
    made = shard(entry(1, mode="async"), apply=add_to_value)
    assert made.handle(1, item(PUSH, [1])) == []
    assert made.handle(0, item(PUSH, [2])) == []
    made.handle(0, item(INIT, [10]))
    assert said(made.handle(0, item(PULL))) == [(0, VALUE, [13])]


def test_an_asynchronous_answer_does_not_change_with_the_next_update():
    made = shard(entry(1, mode="async"), apply=add_to_value)
    made.handle(0, item(INIT, [0]))
    first = made.handle(0, item(PUSH, [1], flags=WANT_VALUE))
    made.handle(1, item(PUSH, [1]))
    assert said(first) == [(0, VALUE, [1])]


def test_an_update_that_raises_tells_every_rank_the_key_and_the_reason_now_and_later():
    def apply(unit, pushes):
        raise ArithmeticError("no square root of a cat")

    made = shard(entry(1), apply=apply)
    made.handle(0, item(INIT, [0]))
    made.handle(0, item(PUSH, [1]))
    replies = said(made.handle(1, item(PUSH, [1])))
    assert [(rank, op) for rank, op, _ in replies] == [(0, ERROR), (1, ERROR)]
    for text in (replies[0][2], replies[1][2], said(made.handle(0, item(PULL)))[0][2]):
        assert "key 'weight'" in text
        assert "server 0" in text
        assert "ArithmeticError: no square root of a cat" in text


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (item(PUSH, [1, 2]), "2 elements where the slice has 3"),
        (item(INIT, [1, 2, 3, 4]), "4 elements where the slice has 3"),
        (item(PUSH, []), "0 elements where the slice has 3"),
        (item(PUSH, [1, 2, 3], dtype="float64"), "6 elements"),
        (Item(Record(KEY, 0, 1, 1, 0, PUSH), b"", b"12345"), "buffer size"),
        (item(PULL, number=9), "no slice 9"),
        (Item(Record(99, 0, 1, 1, 0, PULL), b"", b""), "no slice 0 of key id 99"),
        (item(VALUE), "not for a server"),
        (item(250), "not for a server"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_and_changes_nothing(bad, reason):
    made = shard()
    with pytest.raises(ValueError, match=reason):
        made.handle(0, bad)
    made.handle(0, item(INIT, [1, 2, 3]))
    made.handle(0, item(PUSH, [1, 1, 1]))
    made.handle(1, item(PUSH, [1, 1, 1]))
    assert said(made.handle(0, item(PULL))) == [(0, VALUE, [2, 2, 2])]


def test_who_is_awaited_shows_in_the_repr():
    made = shard()
    assert "awaited ranks: none" in repr(made)
    made.handle(0, item(INIT, [0, 0, 0]))
    made.handle(1, item(PUSH, [0, 0, 0]))
    assert "{\"key 'weight'\": [0]}" in repr(made)


def test_a_value_is_replaced_where_that_is_asked_for():
    made = shard()
    made.handle(0, item(INIT, [1, 2, 3]))
    on_its_way = made.handle(1, item(PULL))
    assert said(made.handle(0, item(INIT, [7, 8, 9], flags=REPLACE))) == [(0, DONE, [])]
    assert said(made.handle(1, item(PULL))) == [(1, VALUE, [7, 8, 9])]
    assert said(on_its_way) == [(1, VALUE, [1, 2, 3])]  # its memory is another one
