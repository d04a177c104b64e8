"""Multipliers, schedules, and what a script changes on its optimizer while it trains."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from cases import matrix

STORE = "dist_sync_p3"
SHAPES = {"weight": (5, 4), "bias": (3,)}  # three slices, and one


def gradient(shape, step, rank):
    draw = np.random.RandomState(10 * step + rank)
    return mx.nd.array(draw.randint(-16, 16, shape) / 8)


def assert_equal(found, wanted):
    """Of histories: lists of lists of arrays."""
    assert len(found) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(found, wanted)):
        for place, (a, b) in enumerate(zip(ours, theirs)):
            np.testing.assert_array_equal(a, b, f"step {step}, array {place}")


def by_the_store(make, keys, steps=5, change=None):
    """The weights after each step; ``change(optimizer, step)`` comes before it."""
    kv, optimizer = mx.kv.create(STORE), make(keys)
    kv.set_optimizer(optimizer)
    weights = [mx.nd.ones(shape) for shape in SHAPES.values()]
    kv.init(keys, weights)
    history = []
    for step in range(steps):
        if change is not None:
            change(optimizer, step)
        pushed = [gradient(shape, step, kv.rank) for shape in SHAPES.values()]
        kv.pushpull(keys, pushed, out=weights)
        history.append([weight.asnumpy() for weight in weights])
    return history


def by_the_updater(make, keys, ranks, steps=5, change=None):
    optimizer = make(keys)
    updater = mx.optimizer.get_updater(optimizer)
    weights = [mx.nd.ones(shape) for shape in SHAPES.values()]
    history = []
    for step in range(steps):
        if change is not None:
            change(optimizer, step)
        for key, weight in zip(keys, weights):
            summed = sum(gradient(weight.shape, step, rank) for rank in range(ranks))
            updater(key, summed, weight)
        history.append([weight.asnumpy() for weight in weights])
    return history


# ---- multipliers


def with_multipliers(keys):
    names = dict(zip(keys, SHAPES)) if isinstance(keys[0], int) else {}
    optimizer = mx.optimizer.SGD(learning_rate=0.25, wd=0.1, momentum=0.5, param_idx2name=names)
    optimizer.set_lr_mult({"weight": 0, "bias": 2})
    optimizer.set_wd_mult({"bias": 0})
    return optimizer


@pytest.mark.parametrize("job", ["single", "pair"])
@pytest.mark.parametrize("keys", [[3, 7], ["weight", "bias"]], ids=["int", "str"])
def test_multipliers_are_found_by_index_and_by_name(keys, job, request):
    results = request.getfixturevalue(job).run(by_the_store, with_multipliers, keys)
    expected = by_the_updater(with_multipliers, keys, len(results))
    assert (expected[-1][0] == 1).all() and (expected[-1][1] != 1).all()
    for history in results:
        assert_equal(history, expected)


def train(kvstore, optimizer, settings, batches, change=None):
    """Weights after each step of a Trainer; ``batches``: the sizes that `step` is told."""
    net = gluon.nn.Dense(3, in_units=11)
    net.initialize(mx.init.Constant(0.5))
    trainer = gluon.Trainer(net.collect_params(), optimizer, settings(), kvstore=kvstore)
    history, rates = [], []
    for step, batch in enumerate(batches):
        if change is not None:
            change(trainer, net, step)
        data = np.random.RandomState(step).randint(-8, 8, (batch, 11)) / 8
        with autograd.record():
            loss = (net(mx.nd.array(data)) ** 2).sum() / 64
        loss.backward()
        trainer.step(batch)
        rates.append(trainer.learning_rate)
        history.append([p.data().asnumpy() for p in net.collect_params().values()])
    return history, rates


def momentum_sgd():
    return {"learning_rate": 0.25, "momentum": 0.5, "wd": 0.1}


def multiply(trainer, net, step):
    if step == 0:
        net.weight.lr_mult, net.bias.lr_mult, net.bias.wd_mult = 0, 2, 0
    elif step == 3:
        net.weight.lr_mult, net.bias.wd_mult = 0.5, 3


def test_multipliers_of_parameters_also_when_they_change(single):
    wanted, _ = train(None, "sgd", momentum_sgd, [4] * 6, multiply)
    [(found, _)] = single.run(train, STORE, "sgd", momentum_sgd, [4] * 6, multiply)
    assert_equal(found, wanted)


# ---- batches


@pytest.mark.parametrize("store", [STORE, "dist_async_p3"])
def test_a_batch_of_another_size_is_rescaled_as_in_one_process(store, single):
    wanted, _ = train(None, "sgd", momentum_sgd, [4, 3, 4, 1])
    [(found, _)] = single.run(train, store, "sgd", momentum_sgd, [4, 3, 4, 1])
    assert_equal(found, wanted)


# ---- schedules


def cosine():
    return {"lr_scheduler": mx.lr_scheduler.CosineScheduler(4, 0.5, 0.125, warmup_steps=1)}


def poly():
    return {"lr_scheduler": mx.lr_scheduler.PolyScheduler(3, 0.5, pwr=2), "wd": 0.1}


def another_schedule(trainer, net, step):
    if step == 2:
        schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
        trainer.optimizer.lr_scheduler = schedule
    if step == 4:
        trainer.optimizer.lr_scheduler.base_lr = 0.25
    if step == 6:
        trainer.optimizer.lr_scheduler = None
        trainer.set_learning_rate(0.125)


@pytest.mark.parametrize("settings", [cosine, poly])
@pytest.mark.parametrize("change", [None, another_schedule])
def test_schedules_and_what_the_trainer_says_of_them(settings, change, single):
    batches = [2] * 8
    wanted, wanted_rates = train(None, "adam", settings, batches, change)
    [(found, rates)] = single.run(train, STORE, "adam", settings, batches, change)
    assert rates == wanted_rates
    assert_equal(found, wanted)


# ---- attributes


def sgd(keys):
    return mx.optimizer.SGD(learning_rate=0.25, momentum=0.5)


def adam(keys):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.25)
    return mx.optimizer.Adam(lr_scheduler=schedule, learning_rate=0.25)


def change_everything(optimizer, step):
    adaptive = isinstance(optimizer, mx.optimizer.Adam)
    if step == 1:
        optimizer.wd, optimizer.rescale_grad = 0.1, np.float32(0.1)
    elif step == 2:
        optimizer.clip_gradient = 0.05
        optimizer.set_lr_mult({"weight": 0.5, 7: 2.0})
    elif step == 3:
        optimizer.clip_gradient = None
        optimizer.wd_mult["bias"] = 3.0
        if adaptive:
            optimizer.beta1, optimizer.epsilon = 0.5, 1e-3
        else:
            optimizer.momentum = 0.125
    elif step == 4:
        optimizer.lr_mult.clear()
        if adaptive:
            optimizer.lr_scheduler.base_lr = 1.0
        else:
            optimizer.set_learning_rate(np.float64(0.125))
    elif step == 5 and not adaptive:
        optimizer.momentum = 0.0


@pytest.mark.parametrize("job", ["single", "pair"])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("keys", [[3, 7], ["weight", "bias"]], ids=["int", "str"])
def test_whatever_a_script_changes_takes_effect_with_the_next_push(make, keys, job, request):
    results = request.getfixturevalue(job).run(by_the_store, make, keys, 7, change_everything)
    expected = by_the_updater(make, keys, len(results), 7, change_everything)
    for history in results:
        assert_equal(history, expected)


def the_optimizer_is_still_the_scripts():
    """Used by the store first, then locally: as if the store had never seen it."""
    optimizer = adam([])
    by_the_store(lambda keys: optimizer, ["weight", "bias"])
    after = by_the_updater(lambda keys: optimizer, ["weight", "bias"], 1)
    return after, by_the_updater(adam, ["weight", "bias"], 1)


def test_a_scripts_own_optimizer_is_not_changed(single):
    [(found, wanted)] = single.run(the_optimizer_is_still_the_scripts)
    assert_equal(found, wanted)


def used_before():
    """An optimizer that has trained here, handed to the store: its counts go on."""

    def make(keys):
        optimizer = mx.optimizer.Adam(learning_rate=0.25)
        for _ in range(3):
            optimizer._update_count(keys)
        return optimizer

    keys = ["weight", "bias"]
    return by_the_store(make, keys), by_the_updater(make, keys, 1)


def test_an_optimizer_that_was_used_before_counts_on(single):
    [(found, wanted)] = single.run(used_before)
    assert_equal(found, wanted)


# ---- LARS by name; aggregation


def fit(kvstore):
    """The weights of a Module with the LARS optimizer."""
    data, label = np.random.RandomState(1).rand(8, 5), np.zeros((8, 4))
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    net = mx.sym.BatchNorm(net, name="bn", fix_gamma=False)
    net = mx.sym.LinearRegressionOutput(net, mx.sym.var("label"), name="out")
    module = mx.mod.Module(net, ["data"], ["label"])
    module.fit(
        mx.io.NDArrayIter(data, label, 4, label_name="label"),
        num_epoch=3,
        kvstore=kvstore,
        optimizer="lars",
        optimizer_params={"learning_rate": 0.5, "eta": 1.0, "momentum": 0.9, "wd": 0.01},
        initializer=mx.init.Constant(0.5),
        eval_metric="mse",
    )
    weights, _ = module.get_params()
    return {name: array.asnumpy() for name, array in weights.items()}


def test_lars_leaves_some_parameters_alone_by_name_in_a_module(single):
    wanted = fit(None)
    [found] = single.run(fit, STORE)
    assert set(found) == {"fc_weight", "fc_bias", "bn_gamma", "bn_beta"}
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, name)


def lars_with_names():
    names = {0: "dense_weight", 1: "dense_bias"}
    return {"learning_rate": 0.125, "eta": 1.0, "momentum": 0.9, "param_idx2name": names}


def lars_without_names():
    return {"learning_rate": 0.125, "eta": 1.0, "momentum": 0.9}


def test_lars_leaves_some_parameters_alone_by_name_in_a_trainer(single):
    expected = []
    for settings in (lars_with_names, lars_without_names):
        wanted, _ = train(None, "lars", settings, [4] * 4)
        [(found, _)] = single.run(train, STORE, "lars", settings, [4] * 4)
        assert_equal(found, wanted)
        expected.append(wanted[-1][1])
    assert (expected[0] != expected[1]).any()  # the name of the bias matters


def aggregated(name, size):
    os.environ["MXNET_OPTIMIZER_AGGREGATION_SIZE"] = size
    try:
        ours = matrix.through_the_store(name, "float32")
        return ours, matrix.in_one_process(name, "float32", 1)
    finally:
        del os.environ["MXNET_OPTIMIZER_AGGREGATION_SIZE"]


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
@pytest.mark.parametrize("size", ["1", "2", "45"])
def test_as_many_parameters_at_once_as_in_one_process(name, size, single):
    [pair] = single.run(aggregated, name, size)
    assert matrix.largest_difference(pair) == 0
