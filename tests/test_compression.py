"""Compression: against loops written from MXNet's definition, and damaged payloads."""

from __future__ import annotations

import numpy as np
import pytest

from p3.compression import Compression, decode, encode, parse
from p3.errors import UsageError


def two_bit(gradient, residual, threshold):
    """What is sent, by the definition, one value after another; ``residual`` is updated."""
    sent = np.zeros_like(gradient)
    for i, value in enumerate(gradient):
        residual[i] += value
        if residual[i] >= threshold:
            sent[i] = threshold
        elif residual[i] <= -threshold:
            sent[i] = -threshold
        residual[i] -= sent[i]
    return sent


def one_bit(gradient, residual, threshold):
    sent = np.zeros_like(gradient)
    for i, value in enumerate(gradient):
        residual[i] += value
        sent[i] = 1 if residual[i] > threshold else -1
        residual[i] -= sent[i]
    return sent


@pytest.mark.parametrize("kind, reference, bits", [("2bit", two_bit, 2), ("1bit", one_bit, 1)])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 1001])
def test_codes_and_residuals_are_those_of_the_definition(kind, reference, bits, size):
    compression = parse({"type": kind, "threshold": 0.3})
    chance = np.random.RandomState(size)
    ours, theirs = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for _ in range(5):
        gradient = chance.normal(0, 0.5, size).astype(np.float32)
        payload = encode(compression, gradient, ours)
        assert len(payload) == 8 + -(-size * bits // 8)
        sent = reference(gradient, theirs, np.float32(0.3))
        np.testing.assert_array_equal(decode(payload, size), sent)
        np.testing.assert_array_equal(ours, theirs)


def test_values_at_the_threshold_are_sent():
    compression, residual = parse({"type": "2bit"}), np.zeros(4, np.float32)
    payload = encode(compression, np.array([0.5, -0.5, 0.49, -0.49], np.float32), residual)
    assert decode(payload, 4).tolist() == [0.5, -0.5, 0, 0]


def test_half_precision():
    compression = parse({"type": "fp16"})
    assert not compression.keeps_residual
    gradient = np.array([1.0, -2.5, 1e-9, 65504], np.float32)
    assert decode(encode(compression, gradient, None), 4).tolist() == [1.0, -2.5, 0, 65504]


@pytest.mark.parametrize(
    "params, words",
    [
        ({"type": "4bit"}, "2bit, 1bit, fp16, none"),
        ({"type": "2bit", "threshold": -1}, "threshold"),
        ({"type": "2bit", "threshold": 0}, "threshold"),
        ({"type": "2bit", "threshold": "much"}, "threshold"),
        ({"type": "2bit", "treshold": 1}, "treshold"),
        ({}, "a dict with a type"),
        ({"threshold": 1}, "a dict with a type"),
        (None, "a dict with a type"),
        ("2bit", "a dict with a type"),
    ],
)
def test_what_cannot_be_is_refused(params, words):
    with pytest.raises(UsageError, match=words):
        parse(params)


def test_none_switches_compression_off():
    assert parse({"type": "none"}) is None


@pytest.mark.parametrize("payload", [b"", b"\1\0\0\0", b"\1\0\0\0\0\0\0\0", b"\7" + bytes(8)])
def test_damaged_payloads_are_refused(payload):
    with pytest.raises(ValueError, match="compressed"):
        decode(payload, 3)


def test_numbers_of_the_setting():
    assert parse({"type": "2bit", "threshold": "0.25"}) == Compression(1, 0.25)
