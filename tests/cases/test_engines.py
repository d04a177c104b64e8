"""MXNet's engines and Gluon's ways to run a net: the same results with all of them."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
ROWS, STEPS = 8, 4
#: how Gluon runs the net: operator by operator, or as one graph, which may own its memory
WAYS = {
    "imperative": None,
    "hybridized": {},
    "static": {"static_alloc": True},
    "static shapes": {"static_alloc": True, "static_shape": True},
}


def make_net():
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(3, 3, activation="relu"),
            gluon.nn.MaxPool2D(),
            gluon.nn.Flatten(),
            gluon.nn.Dense(7, activation="tanh"),
            gluon.nn.Dense(2),
        )
    return net


def train(kvstore, rows, way, update_on_kvstore):
    mx.random.seed(0)  # alike on all ranks, as Trainer has computed a gradient when it begins
    numbers = np.random.RandomState(1)
    net, loss_of = make_net(), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Uniform(0.5))
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    settings = {"learning_rate": 0.25, "momentum": 0.5}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", settings, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    for _ in range(STEPS):
        data = mx.nd.array(numbers.rand(ROWS, 1, 6, 6)[rows])
        label = mx.nd.array(numbers.randint(0, 2, ROWS)[rows])
        with autograd.record():
            loss = loss_of(net(data), label)
        loss.backward()
        trainer.step(ROWS)
    return [param.data().asnumpy() for param in net.collect_params().values()]


def train_on_a_rank(*args):
    rank = mx.kv.create(STORE).rank
    share = ROWS // 2
    return train(STORE, slice(share * rank, share * (rank + 1)), *args)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_every_engine_gives_what_one_process_gives(clusters, engine, way, update_on_kvstore):
    if engine == "ThreadedEnginePerDevice":  # the default
        job = clusters(2, 2)
    else:
        job = clusters(2, 1, MXNET_ENGINE_TYPE=engine)
    expected = train(None, slice(0, ROWS), "imperative", update_on_kvstore)
    for result in job.run(train_on_a_rank, way, update_on_kvstore):
        for got, right in zip(result, expected):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
