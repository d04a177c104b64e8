"""Module: where updates happen, and that ranks which begin with other weights agree at once."""

from __future__ import annotations

import os
from unittest import mock

import mxnet as mx
import numpy as np
import pytest

STORE = "dist_sync_p3"
ROWS = 4
ON_WORKERS = {"MXNET_UPDATE_ON_KVSTORE": "0"}


def make_module(rows, seed, contexts=1):
    mx.random.seed(seed)
    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=9, name="dense")
    network = mx.sym.LinearRegressionOutput(dense, name="regression")
    devices = [mx.cpu(number) for number in range(contexts)]
    module = mx.mod.Module(network, label_names=["regression_label"], context=devices)
    module.bind([("data", (rows, 5))], [("regression_label", (rows, 9))])
    module.init_params(mx.init.Uniform(1.0))
    return module


def train(kvstore, rows, steps, seed=0, contexts=1):
    """The weights after init_optimizer, and after the last step."""
    module = make_module(rows.stop - rows.start, seed, contexts)
    module.init_optimizer(
        kvstore=kvstore, optimizer_params={"learning_rate": 0.25, "momentum": 0.5}
    )
    first = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
    numbers = np.random.RandomState(3)
    for _ in range(steps):
        data, label = numbers.randint(-8, 9, (ROWS, 5)), numbers.randint(-8, 9, (ROWS, 9))
        batch = [mx.nd.array(array[rows] / 8) for array in (data, label)]
        module.forward_backward(mx.io.DataBatch(batch[:1], batch[1:]))
        module.update()
    return first, {name: array.asnumpy() for name, array in module.get_params()[0].items()}


def train_from_other_weights(environment, steps, contexts):
    rank = mx.kv.create(STORE).rank
    with mock.patch.dict(os.environ, environment):
        return train(STORE, slice(2 * rank, 2 * rank + 2), steps, rank, contexts)


@pytest.mark.parametrize("environment", [{}, ON_WORKERS])
@pytest.mark.parametrize(("steps", "contexts"), [(1, 1), (3, 1), (3, 2)])
def test_ranks_that_begin_with_other_weights_go_on_from_rank_0s(pair, environment, steps, contexts):
    expected = train(None, slice(0, ROWS), steps)
    for result in pair.run(train_from_other_weights, environment, steps, contexts):
        for got, right in zip(result, expected):
            assert got.keys() == right.keys()
            for name, array in got.items():
                np.testing.assert_allclose(array, right[name], rtol=1e-5, atol=1e-6)


def train_modules_on_one_store(kvstore):
    """Three modules whose parameters have the same names, on one store object."""
    store = kvstore and mx.kv.create(kvstore)
    rank = store.rank if store else 0
    rows = slice(2 * rank, 2 * rank + 2) if store else slice(0, ROWS)
    return [train(store, rows, 2, seed=seed)[1] for seed in (1, 2, 3)]


def test_modules_that_share_a_store_have_keys_of_their_own(pair):
    expected = train_modules_on_one_store(None)
    for result in pair.run(train_modules_on_one_store, STORE):
        for got, right in zip(result, expected):
            for name, array in got.items():
                np.testing.assert_allclose(array, right[name], rtol=1e-5, atol=1e-6)


def where_a_module_updates(kvstore, environment):
    with mock.patch.dict(os.environ, environment):
        module = make_module(2, 0)
        try:
            module.init_optimizer(kvstore=kvstore)
        except ValueError as error:
            return str(error)
        return module._update_on_kvstore


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_environment_says_where_a_synchronous_module_updates(pair, value):
    environment = {} if value is None else {"MXNET_UPDATE_ON_KVSTORE": value}
    told = pair.run(where_a_module_updates, STORE, environment)
    assert told == [value != "0"] * 2


def test_an_asynchronous_module_updates_on_the_servers_or_says_why_not(pair):
    kind = "dist_async_p3"
    assert pair.run(where_a_module_updates, kind, {}) == [True] * 2
    assert pair.run(where_a_module_updates, kind, {"MXNET_UPDATE_ON_KVSTORE": "1"}) == [True] * 2
    for told in pair.run(where_a_module_updates, kind, ON_WORKERS):
        assert "MXNET_UPDATE_ON_KVSTORE=0" in told and kind in told


def train_buckets(kvstore):
    """A module of two sequence lengths, which share weights, store and optimizer."""

    def network(length):
        data = mx.sym.reshape(mx.sym.var("data"), (-1, 1))
        dense = mx.sym.FullyConnected(data, num_hidden=9, name="dense")
        return mx.sym.MakeLoss(dense.sum()), ["data"], []

    rank = mx.kv.create(kvstore).rank if kvstore else 0
    rows = 2 if kvstore else ROWS
    module = mx.mod.BucketingModule(network, default_bucket_key=4)
    module.bind([("data", (rows, 4))])
    module.init_params(mx.init.Constant(1 + rank))
    settings = {"learning_rate": 0.5, "momentum": 0.5, "rescale_grad": 1 / ROWS}
    module.init_optimizer(kvstore=kvstore, optimizer_params=settings)
    for length in (4, 2, 4, 2):
        array = mx.nd.ones((rows, length))
        shapes = [("data", (rows, length))]
        batch = mx.io.DataBatch([array], [], bucket_key=length, provide_data=shapes)
        module.forward_backward(batch)
        module.update()
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}


def test_a_bucketing_module(pair):
    expected = train_buckets(None)
    for result in pair.run(train_buckets, STORE):
        for name, array in result.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-6)
