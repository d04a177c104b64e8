"""Gluon's Trainer: what it does to parameters in one process happens on every rank.

``both_equal_one_process`` calls ``function(kvstore, rows, *args)`` with half of the batch on each
of two ranks, and compares with the same call on the whole batch in one process, without a store.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon.parameter import DeferredInitializationError

STORE = "dist_sync_p3"
ROWS = 4
WHOLE = slice(0, ROWS)
SGD = ("sgd", {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125})
ADAM = ("adam", {"learning_rate": 0.125, "epsilon": 1e-3})


def on_a_rank(function, kvstore, args):
    rank = mx.kv.create(STORE).rank
    share = ROWS // 2
    return function(kvstore, slice(rank * share, (rank + 1) * share), *args)


def both_equal_one_process(job, function, *args, store=STORE):
    """Run on both ranks and here; assert that all return the same arrays."""
    expected = function(None, WHOLE, *args)
    results = job.run(on_a_rank, function, store, args)
    for result in results:
        assert len(result) == len(expected)
        for got, right in zip(result, expected):
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)


def dense(units=5, **settings):
    layer = gluon.nn.Dense(units, **{"in_units": 4, **settings})
    layer.initialize(mx.init.Constant(0.25))
    return layer


def inputs(step, rows=WHOLE):
    numbers = np.random.RandomState(step).randint(-4, 5, (ROWS, 4))
    return mx.nd.array(numbers[rows] / 4)


def weights(*blocks):
    """The blocks' weights, layer by layer as they were made."""
    arrays = []
    for block in blocks:
        arrays += [param.data().asnumpy() for param in block.collect_params().values()]
    return arrays


# ---- deferred initialisation (W5)


def train_a_layer_of_unknown_size(kvstore, rows, hybridize):
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(gluon.nn.Dense(3), gluon.nn.Dense(2))
    net.initialize(mx.init.Constant(0.25))
    if hybridize:
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), *SGD, kvstore=kvstore)
    for step in range(3):
        with autograd.record():
            loss = net(inputs(step, rows)).sum()
        loss.backward()
        trainer.step(ROWS)
    return weights(net)


@pytest.mark.parametrize("hybridize", [False, True])
def test_sizes_that_the_first_batch_tells(pair, hybridize):
    both_equal_one_process(pair, train_a_layer_of_unknown_size, hybridize)


def step_with_a_layer_that_no_batch_has_reached(kvstore, rows):
    net, late = dense(), gluon.nn.Dense(2)
    late.initialize()
    params = [*net.collect_params().values(), *late.collect_params().values()]
    trainer = gluon.Trainer(params, *SGD, kvstore=kvstore)
    with autograd.record():
        loss = net(inputs(0, rows)).sum()
    loss.backward()
    with pytest.raises(DeferredInitializationError):
        trainer.step(ROWS, ignore_stale_grad=True)
    late(inputs(0))
    with autograd.record():
        loss = (net(inputs(1, rows)) + late(inputs(1, rows)).sum()).sum()
    loss.backward()
    trainer.step(ROWS)
    return weights(net)


def test_a_layer_of_unknown_size_is_refused_as_in_one_process_and_training_goes_on(pair):
    both_equal_one_process(pair, step_with_a_layer_that_no_batch_has_reached)


# ---- frozen parameters, shared ones (W6, W9)


def freeze_and_unfreeze(kvstore, rows, optimizer, update_on_kvstore):
    first, second = dense(4), dense(3)
    params = [*first.collect_params().values(), *second.collect_params().values()]
    trainer = gluon.Trainer(
        params, *optimizer, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    for step in range(1, 8):
        if step == 3:
            first.collect_params().setattr("grad_req", "null")
        if step == 5:
            first.collect_params().setattr("grad_req", "write")
        with autograd.record():
            loss = second(first(inputs(step, rows))).sum()
        loss.backward()
        trainer.step(ROWS)
    return weights(first, second)


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_parameters_frozen_at_step_3_and_unfrozen_at_5(pair, optimizer, update_on_kvstore):
    both_equal_one_process(pair, freeze_and_unfreeze, optimizer, update_on_kvstore)


def train_a_parameter_of_two_layers(kvstore, rows, update_on_kvstore):
    first = dense(4)
    second = gluon.nn.Dense(4, in_units=4, params=first.collect_params())
    net = gluon.nn.Sequential()
    net.add(first, second)
    params = net.collect_params()
    trainer = gluon.Trainer(params, *SGD, kvstore=kvstore, update_on_kvstore=update_on_kvstore)
    for step in range(3):
        with autograd.record():
            loss = net(inputs(step, rows)).sum()
        loss.backward()
        trainer.step(ROWS)
    assert len(weights(net)) == 2
    return weights(net)


@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_a_parameter_that_two_layers_share(pair, update_on_kvstore):
    both_equal_one_process(pair, train_a_parameter_of_two_layers, update_on_kvstore)


def train_a_parameter_listed(kvstore, rows, times, update_on_kvstore):
    net = dense()
    weight, bias = net.weight, net.bias
    params = [weight, bias, *[weight] * (times - 1)]
    trainer = gluon.Trainer(params, *SGD, kvstore=kvstore, update_on_kvstore=update_on_kvstore)
    for step in range(3):
        with autograd.record():
            loss = net(inputs(step, rows)).sum()
        loss.backward()
        trainer.step(ROWS, ignore_stale_grad=kvstore is None)
    return weights(net)


@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_a_parameter_listed_twice_is_trained_once(pair, update_on_kvstore):
    """In one process, too, but MXNet wants ``ignore_stale_grad`` for it."""
    both_equal_one_process(pair, train_a_parameter_listed, 2, update_on_kvstore)


def train_two_parameters_of_one_name():
    nets = [dense(prefix="same_") for _ in range(2)]
    params = [net.weight for net in nets]
    trainer = gluon.Trainer(params, *SGD, kvstore=STORE)
    with autograd.record():
        loss = sum(net(inputs(0)).sum() for net in nets)
    loss.backward()
    with pytest.raises(ValueError, match="both called 'same_weight'"):
        trainer.step(ROWS)


def test_two_parameters_of_one_name_are_refused(pair):
    pair.run(train_two_parameters_of_one_name)


# ---- two trainers (W10)


def train_a_gan(kvstore, rows, share, update_on_kvstore):
    """Two Trainers of different optimizers in turns, on one store object or on two by name."""
    generator, critic = dense(4), dense(2)
    store = mx.kv.create(kvstore) if kvstore and share else kvstore
    trainers = [
        gluon.Trainer(
            net.collect_params(), *optimizer, kvstore=store, update_on_kvstore=update_on_kvstore
        )
        for net, optimizer in zip((generator, critic), (SGD, ADAM))
    ]
    for step in range(4):
        for trainer in trainers:
            with autograd.record():
                loss = critic(generator(inputs(step, rows))).sum()
            loss.backward()
            trainer.step(ROWS)
    if share and kvstore:
        assert trainers[0]._kvstore is store
        assert trainers[1]._kvstore is not store
    return weights(generator, critic)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_two_trainers_do_not_get_in_each_others_way(pair, share, update_on_kvstore):
    both_equal_one_process(pair, train_a_gan, share, update_on_kvstore)


def train_again_with_the_same_store(kvstore, rows):
    store, net = kvstore and mx.kv.create(kvstore), dense()
    for optimizer in (SGD, ("nag", {"learning_rate": 0.25, "momentum": 0.5})):
        trainer = gluon.Trainer(net.collect_params(), *optimizer, kvstore=store)
        for step in range(2):
            with autograd.record():
                loss = net(inputs(step, rows)).sum()
            loss.backward()
            trainer.step(ROWS)
        del trainer
    return weights(net)


def test_a_trainer_after_another_starts_from_the_weights_that_are_there(pair):
    both_equal_one_process(pair, train_again_with_the_same_store)


# ---- the batch size (O3)


def train_with_a_smaller_last_batch(kvstore, rows, update_on_kvstore):
    net = dense()
    trainer = gluon.Trainer(
        net.collect_params(), *SGD, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    for step, batch_size in enumerate((4, 2, 4)):
        with autograd.record():
            loss = net(inputs(step, rows)).sum()
        loss.backward()
        trainer.step(batch_size)
    return weights(net)


@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_the_batch_size_may_change(pair, update_on_kvstore):
    both_equal_one_process(pair, train_with_a_smaller_last_batch, update_on_kvstore)
