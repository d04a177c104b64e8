"""Placement of keys: balanced bytes, whatever the sizes and their order."""

import itertools
import random

import pytest

from p3.scheduler.directory import Spec, slice_sizes_bytes
from p3.scheduler.placement import OVERHEAD_BYTES, Placement
from p3.slicing import cut

_SLICE_ELEMS = 50_000

# weights and biases of VGG-16's convolutions (3 x 3) and dense layers
_CONVOLUTIONS = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
VGG16 = [
    elems
    for inputs, outputs in itertools.chain(
        ((9 * a, b) for a, b in zip(_CONVOLUTIONS, _CONVOLUTIONS[1:])),
        [(25_088, 4096), (4096, 4096), (4096, 1000)],
    )
    for elems in (inputs * outputs, outputs)
]


def slices(elems, slice_elems=_SLICE_ELEMS):
    return slice_sizes_bytes(Spec((elems,), "float32", "sync", False), slice_elems)


def loads_of(keys, num_servers, slice_elems=_SLICE_ELEMS, whole=False):
    """Bytes on each server, counted from the slices that workers will send."""
    placement = Placement(num_servers)
    loads = [0] * num_servers
    for elems in keys:
        first = placement.place(slices(elems, slice_elems), whole)
        for piece in cut(elems, slice_elems, first, num_servers, whole):
            loads[piece.server] += 4 * (piece.stop - piece.start)
    return loads


def spread(loads):
    return max(loads) / (sum(loads) / len(loads)) - 1


def test_vgg16_has_the_published_number_of_parameters():
    assert sum(VGG16) == 138_357_544


@pytest.mark.parametrize("seed", range(6))
def test_vgg16_is_within_a_tenth_in_any_order(seed):
    keys = list(VGG16)
    if seed:
        random.Random(seed).shuffle(keys)
    assert spread(loads_of(keys, 4)) < 0.1


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("elems", [1, 10, 1000])
def test_equal_small_keys_are_within_a_tenth(num_servers, elems):
    assert spread(loads_of([elems] * 1000, num_servers)) < 0.1


def test_names_do_not_matter():
    """Only sizes are looked at: even int keys, which a hash would pile up, spread as well."""
    assert spread(loads_of([1000 for key in range(0, 2000, 2)], 4)) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_mixed_sizes_in_any_order(seed):
    keys = [1, 100, 10_000, 60_000, 130_000] * 40
    random.Random(seed).shuffle(keys)
    assert spread(loads_of(keys, 4)) < 0.1


def test_remainders_count():
    """Keys of one full slice and a half: the halves must not pile up on one server."""
    loads = loads_of([75_000] * 100, 4)
    assert spread(loads) < 0.02


def test_whole_keys_go_to_the_least_loaded():
    assert spread(loads_of([75_000, 25_000, 50_000, 100_000] * 25, 4, whole=True)) < 0.1


def test_the_least_loaded_is_first_and_ties_go_to_the_lowest_index():
    placement = Placement(3)
    assert [placement.place([100], False) for _ in range(4)] == [0, 1, 2, 0]
    assert placement.place([50], False) == 1
    assert placement.place([50], True) == 2
    assert placement.place([50], False) == 1


def test_a_key_of_many_slices_begins_where_its_rest_fits():
    placement = Placement(2)
    placement.place([1000], False)  # server 0
    assert placement.place([200, 200, 200], False) == 1  # its odd slice goes to server 1
    assert placement.loads_bytes == [1200 + 2 * OVERHEAD_BYTES, 400 + 2 * OVERHEAD_BYTES]


def test_empty_keys_spread():
    placement = Placement(4)
    firsts = [placement.place(sizes, False) for sizes in ([0], [], [0], [])]
    assert sorted(firsts) == [0, 1, 2, 3]


def test_more_servers_than_slices():
    assert spread(loads_of([1001] * 100, 3, slice_elems=600)) < 0.1


def test_same_calls_give_the_same_plan():
    plans = []
    for _ in range(2):
        placement = Placement(5)
        plans.append([placement.place(slices(elems), False) for elems in VGG16])
    assert plans[0] == plans[1]


def test_no_servers_is_refused():
    with pytest.raises(ValueError, match="num_servers=0"):
        Placement(0)


@pytest.mark.parametrize("elems", [0, 1, 2, 7, 8, 9, 15, 16, 17, 1001])
def test_slices_are_those_that_workers_cut(elems):
    pieces = cut(elems, 8, 0, 3, False)
    assert slices(elems, 8) == [4 * (piece.stop - piece.start) for piece in pieces]
