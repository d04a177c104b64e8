"""Parameters' names compared between ranks."""

from __future__ import annotations

import pytest

from p3.errors import UsageError
from p3.mending.names import align, natural, refuse_others


def names(*layers):
    return sorted(f"{layer}_{kind}" for layer in layers for kind in ("weight", "bias"))


def matched(own, first):
    """``{rank 0's name: ours}``"""
    return {name: own[place] for name, place in zip(first, align(own, first))}


def test_numbers_are_sorted_as_numbers():
    text = ["a10b2", "a9", "a10b10", "a", "b1", "a010", "", "7", "10"]
    assert sorted(text, key=natural) == "|7|10|a|a9|a010|a10b2|a10b10|b1".split("|")


@pytest.mark.parametrize("shift", [0, 1, 2, 90, 91, 990])
def test_layers_with_shifted_numbers_are_matched_in_the_order_they_were_made(shift):
    first = names("conv3", *(f"dense{i}" for i in range(8, 12)))
    own = names(f"conv{3 + shift}", *(f"dense{i + shift}" for i in range(8, 12)))
    for name, mine in matched(own, first).items():
        kind, number = ("conv", 4) if name.startswith("conv") else ("dense", 5)
        index = int(name[number:].split("_")[0]) + shift
        assert mine == f"{kind}{index}_{name.split('_')[1]}"


def test_nested_names_and_prefixes_of_a_rank():
    first = names("node1_net9_dense0", "node1_net10_dense0")
    own = names("node12_net10_dense0", "node12_net11_dense0")
    assert matched(own, first)["node1_net9_dense0_bias"] == "node12_net10_dense0_bias"
    assert align(names("hosta_dense0"), names("hostb_dense0")) == [0, 1]


def test_an_order_that_the_script_gave_counts():
    assert align(["b", "a"], ["a", "b"]) == [0, 1]
    assert align(["w10", "w9"], ["w9", "w8"]) == [0, 1]


@pytest.mark.parametrize(
    ("own", "first", "told"),
    [
        (["a", "b", "c"], ["a", "b"], "3 parameters and rank 0 2: only one of them has 'c'"),
        (["a"], ["a", "b"], "1 parameters and rank 0 2: only one of them has 'b'"),
        (list("aefghi"), ["a"], "'e', 'f', 'g', ..."),
        (["dense0_weight", "norm0_gamma"], ["conv0_weight", "dense0_weight"], "'conv0_weight'"),
    ],
)
def test_what_cannot_be_the_same_is_refused(own, first, told):
    with pytest.raises(UsageError) as caught:
        align(own, first)
    assert told in str(caught.value)


def test_names_that_are_keys_must_be_equal():
    refuse_others(["b", "a"], ["a", "b"])
    with pytest.raises(UsageError, match=r"'fc2' of this rank is none of rank 0's.*'fc0'"):
        refuse_others(["fc1", "fc2"], ["fc0", "fc1"])
    with pytest.raises(UsageError, match=r"only one of them has 'fc2'"):
        refuse_others(["fc1", "fc2"], ["fc1"])
