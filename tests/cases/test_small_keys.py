"""Many small keys: the work of a round grows with their number, not faster."""

from __future__ import annotations

import statistics
import time

import mxnet as mx

STORE = "dist_sync_p3"


def seconds_of_rounds(count, rounds):
    """The time of each round, by rank."""
    kv = mx.kv.create(STORE)
    weights = [mx.nd.zeros((10,)) for _ in range(count)]
    gradients = [mx.nd.ones((10,)) for _ in range(count)]
    kv.broadcast(list(range(count)), weights, out=weights)
    mx.nd.waitall()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for key, (gradient, weight) in enumerate(zip(gradients, weights)):
            kv.pushpull(key, gradient, out=weight, priority=-key)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - start)
    assert all((weight.asnumpy() == kv.num_workers).all() for weight in weights)
    return seconds


def test_ten_times_as_many_keys_cost_no_more_each(default_slices):
    """In one run, few and many in turn; a quadratic cost would show as a ratio near ten."""
    few, many = [], []
    for _ in range(3):
        few += default_slices.run(seconds_of_rounds, 50, 10)[0]
        many += default_slices.run(seconds_of_rounds, 500, 10)[0]
    each_of_few = statistics.median(few) / 50
    each_of_many = statistics.median(many) / 500
    assert each_of_many < 3 * each_of_few
