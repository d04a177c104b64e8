"""Every optimizer of MXNet's registry gives the bits of local training, on every topology."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from cases import matrix
from p3.testing import LocalCluster

EMBEDDED = (0, 0)


@pytest.fixture(scope="module", params=[EMBEDDED, *matrix.TOPOLOGIES], ids=str)
def outcomes(request, alone):
    """What ``train_all`` gives on each rank; the cluster trains everything and ends."""
    if request.param == EMBEDDED:
        return [alone(matrix.train_all, 1)]
    workers, servers = request.param
    with LocalCluster(workers, servers, matrix.ENVIRONMENT, deadline_s=240) as cluster:
        return cluster.run(matrix.train_all, workers)


@pytest.mark.parametrize("dtype", matrix.DTYPES)
@pytest.mark.parametrize("name", [name for name in matrix.names() if name != matrix.RANDOM])
def test_the_weights_have_the_bits_of_local_training(name, dtype, outcomes):
    for outcome in outcomes:
        assert matrix.largest_difference(outcome[name, dtype]) == 0


def test_every_optimizer_but_test_and_lbsgd_moves_by_the_schedule(outcomes):
    """The reference is worth something: weights move, and less when the rate has fallen."""
    for name in set(matrix.names()) - {matrix.RANDOM, "test", "lbsgd", "adadelta"}:
        ours, _ = outcomes[0][name, "float32"]
        moved = [np.abs(now[0] - before[0]).max() for before, now in zip(ours, ours[1:])]
        assert min(moved) > 0, name


# ---- SGLD

RATE, SIZE, STEPS = 0.25, 600, 3


def noise(seed):
    """What SGLD adds to a weight without gradient in each step: two keys, in slices."""
    kv = mx.kv.create(matrix.STORE)
    mx.random.seed(seed)
    kv.set_optimizer(mx.optimizer.create("sgld", learning_rate=RATE))
    weights = {key: mx.nd.zeros((SIZE,)) for key in ("a", "b")}
    for key, weight in weights.items():
        kv.broadcast(key, weight, out=weight)
    found = []
    for _ in range(STEPS):
        before = [weight.asnumpy() for weight in weights.values()]
        for key, weight in weights.items():
            kv.pushpull(key, mx.nd.zeros((SIZE,)), out=weight)
        found += [w.asnumpy() - b for w, b in zip(weights.values(), before)]
    return np.array(found)


@pytest.mark.parametrize("job", ["pair", "single"])
def test_sgld_draws_from_the_normal_distribution_of_its_rate(job, request):
    results = request.getfixturevalue(job).run(noise, 5)
    drawn = results[0]
    for other in results[1:]:
        np.testing.assert_array_equal(other, drawn)
    number = drawn.size
    assert abs(drawn.mean()) < 5 * np.sqrt(RATE / number)
    assert abs(drawn.var() / RATE - 1) < 5 * np.sqrt(2 / number)
    # no part repeats another one: slices, servers, keys and steps draw independently
    assert len(np.unique(drawn.round(6))) > 0.98 * number


def test_sgld_follows_the_scripts_seed(single):
    [first], [again], [other] = (single.run(noise, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.99
