"""Trainer: updates on the servers or on the workers, as asked for; asynchronous ones on servers.

``None`` and an unset variable leave the choice to MXNet, which takes the servers.
"""

from __future__ import annotations

import os
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

SIZE = 20
VARIABLE = "MXNET_UPDATE_ON_KVSTORE"


def step(kvstore, update_on_kvstore, environment):
    """``(where updates happen, weights)`` after a step of gradient one; or the error's text."""
    with mock.patch.dict(os.environ, environment):
        param = gluon.Parameter("w", shape=(SIZE,))
        param.initialize(mx.init.Constant(10))
        settings = {"learning_rate": 1}
        trainer = gluon.Trainer(
            [param], "sgd", settings, kvstore=kvstore, update_on_kvstore=update_on_kvstore
        )
        with autograd.record():
            loss = param.data().sum()
        loss.backward()
        try:
            trainer.step(1)
        except ValueError as error:
            return str(error), None
        return trainer._update_on_kvstore, param.data().asnumpy()


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
def test_a_synchronous_trainer_does_what_it_is_told(pair, update_on_kvstore, value):
    environment = {} if value is None else {VARIABLE: value}
    expected = value != "0" if update_on_kvstore is None else update_on_kvstore
    for where, weights in pair.run(step, "dist_sync_p3", update_on_kvstore, environment):
        assert where is expected
        assert (weights == 10 - 2).all()


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
def test_an_asynchronous_trainer_updates_on_the_servers_or_raises(pair, update_on_kvstore, value):
    environment = {} if value is None else {VARIABLE: value}
    for where, weights in pair.run(step, "dist_async_p3", update_on_kvstore, environment):
        if update_on_kvstore is False:
            assert "update_on_kvstore=True" in where
        else:
            assert where is True
            assert np.isin(weights, (10 - 1, 10 - 2)).all()  # the other rank's may be there


def push_without_an_optimizer():
    kv = mx.kv.create("dist_async_p3")
    kv.init("w", mx.nd.ones((SIZE,)))
    for call in (
        lambda: kv.push("w", mx.nd.ones((SIZE,))),
        lambda: kv.pushpull("w", mx.nd.ones((SIZE,)), out=mx.nd.empty((SIZE,))),
    ):
        with pytest.raises(ValueError, match=r"'w'.*'dist_async_p3'.*set_optimizer"):
            call()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    kv.push("w", mx.nd.ones((SIZE,)))
    kv.barrier()


def test_an_asynchronous_push_needs_an_optimizer(pair):
    pair.run(push_without_an_optimizer)
