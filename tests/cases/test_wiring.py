"""Wiring: a script names the store, and Trainer and Module do what they do in one process."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
BATCH = 4


# ---- Gluon


def one_step_of_a_trainer(update_on_kvstore, hybridize):
    """The gradient is rank + 1; the ranks begin with different weights."""
    rank = mx.kv.create(STORE).rank
    net = gluon.nn.Dense(20, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(10 + rank))
    if hybridize:
        net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 1},
        kvstore=STORE,
        update_on_kvstore=update_on_kvstore,
    )
    with autograd.record():
        loss = net(mx.nd.full((1, 1), rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    return net.weight.data().asnumpy()


@pytest.mark.parametrize(
    ("job", "update_on_kvstore", "hybridize"),
    [
        ("pair", None, False),
        ("pair", True, True),
        ("pair", False, False),
        ("naive", None, True),
        ("naive", False, False),
    ],
)
def test_a_trainers_step_moves_all_ranks_from_rank_0s_weights_by_the_sum(
    job, update_on_kvstore, hybridize, request
):
    arguments = (update_on_kvstore, hybridize)
    for weight in request.getfixturevalue(job).run(one_step_of_a_trainer, *arguments):
        assert (weight == 10 - 3).all()


# ---- Module


def batches(first_row, rows):
    numbers = np.random.RandomState(3)
    for _ in range(3):
        data, label = numbers.randint(-8, 8, (2 * BATCH, 5)), numbers.randint(-8, 8, (2 * BATCH, 9))
        chosen = slice(first_row, first_row + rows)
        yield mx.io.DataBatch([mx.nd.array(data[chosen] / 8)], [mx.nd.array(label[chosen] / 8)])


def three_steps_of_a_module(kvstore, first_row, rows):
    """``(rescale_grad, weights)``; the network is a regression on ``rows`` of each batch."""
    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=9, name="dense")
    network = mx.sym.LinearRegressionOutput(dense, name="regression")
    module = mx.mod.Module(network, label_names=["regression_label"])
    module.bind([("data", (rows, 5))], [("regression_label", (rows, 9))])
    module.init_params(mx.init.Constant(0.5))
    settings = {"learning_rate": 0.5, "momentum": 0.5}
    module.init_optimizer(kvstore=kvstore, optimizer="sgd", optimizer_params=settings)
    for batch in batches(first_row, rows):
        module.forward_backward(batch)
        module.update()
    weights, _ = module.get_params()
    return module._optimizer.rescale_grad, {k: v.asnumpy() for k, v in weights.items()}


def half_of_each_batch():
    return three_steps_of_a_module(STORE, BATCH * mx.kv.create(STORE).rank, BATCH)


def test_a_module_scales_by_the_whole_batch_and_follows_one_process_that_sees_it_all(pair):
    _, expected = three_steps_of_a_module(None, 0, 2 * BATCH)
    for rescale_grad, weights in pair.run(half_of_each_batch):
        assert rescale_grad == 1 / (2 * BATCH)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, expected[name], rtol=1e-5, atol=1e-6)


# ---- what a store says of itself


def two_stores():
    sync, asynchronous = mx.kv.create("dist_device_sync_p3"), mx.kv.create("dist_async_p3")
    sync.init("w", mx.nd.zeros((20,)))
    asynchronous.init("w", mx.nd.ones((20,)))
    first, second = mx.nd.empty((20,)), mx.nd.empty((20,))
    sync.pull("w", out=first)
    asynchronous.pull("w", out=second)
    values = (first[0].asscalar(), second[0].asscalar())
    return (sync.type, asynchronous.type, sync.rank, sync.num_workers), values


def test_stores_know_rank_and_workers_at_once_and_keep_their_keys_apart(pair):
    kinds = ("dist_device_sync_p3", "dist_async_p3")
    assert pair.run(two_stores) == [((*kinds, rank, 2), (0, 1)) for rank in (0, 1)]
