"""Rounds: one push of every rank, each rank's in its order, summed in rank order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from p3.rounds import Gathering, Push, Rounds, total
from p3.wire import PUSH, Record


def push(rank, *values, dtype="float32"):
    """A push of a unit of one slice."""
    return Push(rank, [record()], [np.array(values, dtype)], b"")


def record(number=0):
    return Record(0, number, 1, 1, 0, PUSH)


def summed(pushes, dtype="float32"):
    out = np.full(sum(len(part) for part in pushes[0].parts), -1, dtype)
    total(pushes, out)
    return out.tolist()


def play(num_workers, arrivals):
    """The sums of all rounds that ``arrivals``, as ``(rank, value)``, complete."""
    rounds, sums = Rounds(num_workers), []
    for rank, value in arrivals:
        rounds.add(push(rank, value))
        for pushes in iter(rounds.next, None):
            assert [p.rank for p in pushes] == list(range(num_workers))
            sums += summed(pushes)
    return sums


def test_a_second_push_of_a_rank_waits_for_the_next_round():
    assert play(2, [(0, 1), (0, 10), (1, 100), (1, 1000)]) == [101, 1010]


def test_every_order_of_arrival_gives_the_same_rounds():
    pushes = [(0, 1), (0, 10), (1, 100), (1, 1000), (2, 2), (2, 20)]
    for order in itertools.permutations(range(6)):
        arrivals = [pushes[i] for i in order]
        if all(sorted(a, key=pushes.index) == a for a in by_rank(arrivals)):
            assert play(3, arrivals) == [103, 1030]


def by_rank(arrivals):
    return [[a for a in arrivals if a[0] == rank] for rank in range(3)]


def test_sums_are_made_in_rank_order_whoever_comes_first():
    values = {0: 1e8, 1: 1.0, 2: -1e8}  # in rank order float32 loses the 1, in others it does not
    expected = [float(np.float32(np.float32(1e8) + np.float32(1.0)) + np.float32(-1e8))]
    for ranks in itertools.permutations(values):
        assert play(3, [(rank, values[rank]) for rank in ranks]) == expected


def test_half_precision_is_summed_in_single_precision():
    half = [push(rank, value, dtype="float16") for rank, value in enumerate([60000, 60000, -60000])]
    assert summed(half, "float16") == [60000]  # 120000 is no float16
    fine = [push(rank, 1 + 2.0**-10, dtype="float16") for rank in range(4)]
    assert summed(fine, "float16") == [4 * (1 + 2.0**-10)]


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]
)
def test_every_type_is_summed_in_itself(dtype):
    pushes = [push(rank, 1, 2, 3, dtype=dtype) for rank in range(3)]
    assert summed(pushes, dtype) == [3, 6, 9]
    assert summed(pushes[:1], dtype) == [1, 2, 3]


def test_large_integers_keep_their_last_digit():
    pushes = [push(0, 2**53, dtype="int64"), push(1, 1, dtype="int64")]
    assert summed(pushes, "int64") == [2**53 + 1]


def test_adding_leaves_the_pushes_as_they_were():
    first, second = push(0, 1, 2), push(1, 3, 4)
    summed([first, second])
    assert first.parts[0].tolist() == [1, 2]
    assert second.parts[0].tolist() == [3, 4]


def test_an_empty_unit_has_rounds_too():
    assert summed([push(0), push(1)]) == []


def test_who_is_awaited_is_known_once_somebody_came():
    rounds = Rounds(3)
    assert rounds.awaited() == []
    rounds.add(push(1, 1.0))
    assert rounds.awaited() == [0, 2]
    rounds.add(push(0, 1.0))
    assert rounds.awaited() == [2]
    rounds.add(push(2, 1.0))
    assert rounds.next() is not None
    assert rounds.awaited() == []


def test_without_rounds_every_push_counts_alone():
    rounds = Rounds(2)
    for rank, value in [(1, 5), (1, 6), (0, 7)]:
        rounds.add(push(rank, value))
    singles = list(iter(rounds.any, None))
    assert sorted((p[0].rank, p[0].parts[0][0]) for p in singles) == [(0, 7), (1, 5), (1, 6)]
    assert [p[0].parts[0][0] for p in singles if p[0].rank == 1] == [5, 6]


def test_a_push_of_several_slices_counts_when_all_have_come_in_any_order():
    parts = {3: [1.0, 2.0], 5: [3.0], 9: [4.0]}
    for order in itertools.permutations(parts):
        gathering = Gathering([3, 5, 9])
        arrived = [
            gathering.add(0, record(number), b"extra", np.array(parts[number], "float32"))
            for number in order
        ]
        assert arrived[:2] == [None, None]
        assert [r.slice for r in arrived[2].records] == [3, 5, 9]
        assert arrived[2].extra == b"extra"
        assert summed([arrived[2]]) == [1, 2, 3, 4]


def test_slices_of_different_ranks_do_not_mix():
    gathering = Gathering([0, 1])
    one, two = np.array([1.0]), np.array([2.0])
    assert gathering.add(0, record(0), b"", one) is None
    assert gathering.add(1, record(1), b"", two) is None
    first = gathering.add(1, record(0), b"", two)
    second = gathering.add(0, record(1), b"", one)
    assert (first.rank, second.rank) == (1, 0)
    assert summed([second, first], "float64") == [3, 3]
