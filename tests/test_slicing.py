"""Cutting keys into slices: nothing is lost, nothing twice, and everybody gets the same plan."""

from __future__ import annotations

import itertools

import pytest

from p3.slicing import KeyEntry, Slice, cut

SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 1001]


def entry(shape, first=0, whole=False):
    return KeyEntry(0, 0, "weight", shape, "float32", "sync", whole, first)


@pytest.mark.parametrize(
    ("size", "servers", "whole"), list(itertools.product(SIZES, [1, 2, 3, 200], [False, True]))
)
def test_every_element_is_in_exactly_one_slice_of_at_most_the_given_size(size, servers, whole):
    slices = cut(size, 8, servers - 1, servers, whole)
    assert [part.number for part in slices] == list(range(len(slices)))
    assert [e for part in slices for e in range(part.start, part.stop)] == list(range(size))
    assert all(part.stop - part.start <= 8 for part in slices)
    assert all(part.stop - part.start == 8 for part in slices[:-1])
    assert all(0 <= part.server < servers for part in slices)


@pytest.mark.parametrize("size", [0, 1, 8])
def test_what_fits_into_a_slice_is_one_slice_and_an_empty_key_still_has_one(size):
    assert cut(size, 8, 1, 3, False) == [Slice(0, 0, size, 1)]


def test_slices_go_round_the_servers_from_the_first_one_on():
    assert [part.server for part in cut(5 * 8, 8, 2, 3, False)] == [2, 0, 1, 2, 0]


def test_a_key_kept_whole_has_all_its_slices_on_one_server():
    assert {part.server for part in cut(5 * 8 + 1, 8, 2, 3, True)} == {2}


def test_more_servers_than_slices_leaves_servers_without():
    assert [part.server for part in cut(17, 8, 1, 50, False)] == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments", [(-1, 8, 0, 1), (8, 0, 0, 1), (8, 8, 1, 1), (8, 8, -1, 1), (8, 8, 0, 0)]
)
def test_what_cannot_be_cut_is_refused(arguments):
    with pytest.raises(ValueError, match="cannot cut"):
        cut(*arguments, False)


@pytest.mark.parametrize(
    ("shape", "size"), [((0,), 0), ((3, 0), 0), ((), 1), ((1,), 1), ((4, 3), 12)]
)
def test_the_size_of_empty_scalar_and_other_shapes(shape, size):
    assert entry(shape).size == size
    assert sum(part.stop - part.start for part in entry(shape).slices(8, 3)) == size


def test_offsets_beyond_two_and_four_gigabytes_are_exact():
    size = 65536 * 65537  # elements: more than 2**32, more than 2**34 bytes
    slices = entry((65536, 65537), first=1).slices(50_000_000, 3)
    assert entry((65536, 65537)).size == size
    assert slices[-1].stop == size
    assert slices[-1].start == 50_000_000 * (len(slices) - 1)
    assert all(before.stop == after.start for before, after in zip(slices, slices[1:]))


def test_the_plan_depends_on_nothing_but_the_entry():
    assert entry((100, 3), first=2).slices(8, 3) == entry((100, 3), first=2).slices(8, 3)
    assert entry((300,), first=2).slices(8, 3) == entry((100, 3), first=2).slices(8, 3)
