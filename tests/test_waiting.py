"""Rounds that lack a push: reports, limits, and ranks that have gone."""

from __future__ import annotations

import numpy as np
import pytest

from p3.server.shard import Shard, assign
from p3.server.waiting import Waiting
from p3.slicing import KeyEntry
from p3.wire import DONE, ERROR, INIT, PULL, PUSH, STALL, Item, Record


def shard(report_s=0.0, timeout_s=0.0, workers=3):
    made = Shard(0, workers, 1, 8, assign, Waiting(report_s, timeout_s))
    made.add_key(KeyEntry(7, 1, "w", (2,), "float32", "sync", False, 0))
    return made


def item(op, values=(), turn=1):
    return Item(Record(7, 0, turn, turn, 0, op), b"", np.array(values, "float32").tobytes())


def said(replies):
    return [
        (reply.rank, reply.item.record.op, bytes(reply.item.payload).decode()) for reply in replies
    ]


def test_a_rank_that_has_gone_fails_what_waits_for_it_and_what_will():
    made = shard()
    made.handle(0, item(INIT, [0, 0]))
    made.handle(0, item(PUSH, [1, 1]))
    made.handle(2, item(PUSH, [1, 1]))
    replies = said(made.leave(1))
    assert [(rank, op) for rank, op, _ in replies] == [(0, ERROR), (2, ERROR)]
    assert "'w'" in replies[0][2] and "round 1" in replies[0][2] and "rank 1" in replies[0][2]
    assert said(made.handle(0, item(PUSH, [1, 1], 2)))[0][1] == ERROR


def test_a_rank_that_goes_when_all_its_rounds_are_complete_fails_only_the_next():
    made = shard(workers=2)
    made.handle(0, item(INIT, [0, 0]))
    made.handle(1, item(PUSH, [1, 1]))
    made.handle(0, item(PUSH, [1, 1]))
    assert made.leave(1) == []
    assert [op for _, op, _ in said(made.handle(0, item(PULL)))] == [4]
    assert said(made.handle(0, item(PUSH, [1, 1], 2)))[0][1] == ERROR


def test_a_first_value_that_will_never_come():
    made = shard()
    assert made.handle(1, item(PULL)) == []
    (reply,) = said(made.leave(0))
    assert reply[:2] == (1, ERROR)
    assert "first value" in reply[2] and "rank 0" in reply[2]


def test_reports_come_after_a_time_and_again_after_as_long():
    made = shard(report_s=10)
    made.tick(100)
    made.handle(0, item(INIT, [0, 0]))
    made.handle(0, item(PUSH, [1, 1]))
    assert made.tick(109) == []
    (first,) = said(made.tick(111))
    assert first[:2] == (0, STALL)
    assert "'w'" in first[2] and "rank 1, 2" in first[2] and "11 s" in first[2]
    assert made.tick(119) == []
    assert len(made.tick(121)) == 1


def test_a_round_that_gets_further_waits_anew():
    made = shard(report_s=10, workers=2)
    made.tick(100)
    made.handle(0, item(INIT, [0, 0]))
    made.handle(0, item(PUSH, [1, 1]))
    made.tick(109)
    made.handle(1, item(PUSH, [1, 1]))
    made.handle(0, item(PUSH, [1, 1], 2))
    assert made.tick(115) == []
    assert len(made.tick(120)) == 1


@pytest.mark.parametrize("timeout_s", [0, 5])
def test_waiting_is_an_error_only_where_there_is_a_limit(timeout_s):
    made = shard(timeout_s=timeout_s)
    made.tick(100)
    made.handle(0, item(INIT, [0, 0]))
    made.handle(0, item(PUSH, [1, 1]))
    assert made.tick(104) == []
    replies = said(made.tick(1000))
    assert [op for _, op, _ in replies] == ([ERROR] if timeout_s else [])
    if timeout_s:
        assert "P3_ROUND_TIMEOUT_S" in replies[0][2]


def test_nobody_waits_without_an_end():
    made = shard(report_s=1, timeout_s=1)
    made.handle(0, item(INIT, [0, 0]))
    for rank in range(3):
        made.handle(rank, item(PUSH, [1, 1]))
    assert made.tick(1000) == []
    assert said(made.handle(0, item(INIT, [0, 0]))) == [(0, DONE, "")]
