"""Keys of all kinds, and calls with lists of them."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3.errors import UnknownKeyError, UsageError

STORE = "dist_sync_p3"
SIZE = 20
KEYS = [
    0,
    -1,
    2**31 - 1,
    -(2**31),
    5,
    "5",
    "",
    "gewicht_ä",
    "重み",
    "k" * 300,
    "a b\n",
    np.int64(7),
]


def every_key():
    kv = mx.kv.create(STORE)
    outs = []
    for place, key in enumerate(KEYS):
        out = mx.nd.zeros((SIZE,))
        kv.init(key, mx.nd.full((SIZE,), place))
        kv.pull(key, out=out)
        outs.append(out)
    first = [float(out.asnumpy()[0]) for out in outs]
    for place, (key, out) in enumerate(zip(KEYS, outs)):
        kv.pushpull(key, mx.nd.full((SIZE,), 10 * place), out=out)
    return first, [float(out.asnumpy()[-1]) for out in outs]


def test_every_key_is_its_own(pair):
    for first, second in pair.run(every_key):
        assert first == list(range(len(KEYS)))
        assert second == [20 * place for place in range(len(KEYS))]


def lists_of_lists():
    kv = mx.kv.create(STORE)
    devices = [mx.cpu(0), mx.cpu(1)]
    keys = ["a", 1, "c"]
    kv.init(keys, [mx.nd.zeros((SIZE,))] * 3)
    values = [[mx.nd.full((SIZE,), place + 1, d) for d in devices] for place in range(3)]
    outs = [[mx.nd.zeros((SIZE,), d) for d in devices] for _ in keys]
    kv.pushpull(keys, values, out=outs)
    return [[out.asnumpy().tolist() for out in row] for row in outs]


def test_lists_of_lists_are_a_list_of_devices_for_each_key(pair):
    for rows in pair.run(lists_of_lists):
        for place, row in enumerate(rows):
            assert row == [[4.0 * (place + 1)] * SIZE] * 2


def a_key_twice():
    kv = mx.kv.create(STORE)
    kv.init(["d", "e"], [mx.nd.zeros((SIZE,))] * 2)
    ones = mx.nd.ones((SIZE,))
    outs = [mx.nd.zeros((SIZE,)) for _ in range(3)]
    kv.push(["d", "e", "d"], [ones, 5 * ones, 10 * ones])
    kv.pull(["d", "e", "d"], out=outs)
    return [float(out.asnumpy()[0]) for out in outs]


def test_a_key_that_is_twice_in_a_list_gets_the_sum(pair):
    """As MXNet's local stores do it."""
    kv = mx.kv.create("local")
    kv.init("d", mx.nd.zeros((SIZE,)))
    kv.push(["d", "d"], [mx.nd.ones((SIZE,)), mx.nd.ones((SIZE,)) * 10])
    out = mx.nd.zeros((SIZE,))
    kv.pull("d", out=out)
    expected = 2 * float(out.asnumpy()[0])
    for outs in pair.run(a_key_twice):
        assert outs == [expected, 10, expected]


def bad_keys():
    kv = mx.kv.create(STORE)
    value = mx.nd.zeros((SIZE,))
    for key in (None, 1.5, True, b"x", ("a", 1.5)):
        with pytest.raises(UsageError, match="key"):
            kv.init(key, [value, value] if isinstance(key, tuple) else value)
    with pytest.raises(UsageError, match="2 keys need a list of 2 values"):
        kv.init(["a", "b"], [value])
    with pytest.raises(UsageError, match="empty list"):
        kv.init("a", [])
    with pytest.raises(UnknownKeyError, match="'never'"):
        kv.push("never", value)


def test_bad_keys_are_refused_on_the_caller(single):
    single.run(bad_keys)
