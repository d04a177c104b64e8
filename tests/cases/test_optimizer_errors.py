"""Optimizers that are refused, that fail, that differ between ranks; loss scaling; own classes."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib import amp

from cases import own_optimizer
from p3.errors import UsageError
from p3.server import unpickle

STORE = "dist_sync_p3"
SIZE = 20  # three slices


class Mine(mx.optimizer.SGD):
    """In a module that is not allowed."""


def raised(call, *args):
    """The error that ``call`` raises, as text; fails if there is none."""
    with pytest.raises(Exception) as caught:
        call(*args)
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()
    return f"{type(caught.value).__name__}: {caught.value}"


# ---- refused at once


def set_what_servers_cannot_have(kind):
    kv = mx.kv.create(STORE)
    if kind == "class":
        return raised(kv.set_optimizer, Mine(learning_rate=0.1))
    schedule = own_optimizer.Ticking(lambda number: 0.1)
    return raised(kv.set_optimizer, mx.optimizer.SGD(lr_scheduler=schedule))


@pytest.mark.parametrize("kind", ["class", "lambda"])
def test_what_servers_cannot_load_is_refused_with_what_to_do(kind, pair):
    for told in pair.run(set_what_servers_cannot_have, kind):
        assert told.startswith("UsageError")
        assert "P3_ALLOW_OPTIMIZERS=" in told
        assert kind != "class" or "Mine" in told


def test_a_class_of_the_script_needs_a_module():
    pickled = b"c__main__\nMine\n."
    with pytest.raises(UsageError, match=r"__main__\.Mine.*P3_ALLOW_OPTIMIZERS=my_module"):
        unpickle.loads(pickled)


def set_after_init(size):
    kv = mx.kv.create(STORE)
    kv.init("w", mx.nd.ones((size,)))
    kv.set_optimizer(mx.optimizer.create("lars", learning_rate=0.1))
    return "accepted"


def test_an_optimizer_of_whole_keys_comes_before_keys_in_slices(pair):
    assert pair.run(set_after_init, 8) == ["accepted"] * 2
    for told in pair.run(raised, set_after_init, SIZE):
        assert "LARS" in told and "'w'" in told and "before init" in told


def change_what_cannot_follow():
    kv, optimizer = mx.kv.create(STORE), mx.optimizer.SGD(learning_rate=0.1)
    kv.set_optimizer(optimizer)
    weight = mx.nd.ones((SIZE,))
    kv.init("w", weight)
    kv.push("w", weight)
    optimizer.table = [1, 2]
    return [raised(kv.push, "w", weight) for _ in range(2)]


def test_a_changed_attribute_that_cannot_follow_is_refused(pair):
    for tolds in pair.run(change_what_cannot_follow):
        for told in tolds:
            assert told.startswith("UsageError") and "'table'" in told and "[1, 2]" in told


# ---- classes of one's own


@pytest.fixture
def own(clusters):
    """Two workers and two servers that may load ``own_optimizer.py``."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return clusters(2, 2, P3_ALLOW_OPTIMIZERS=own_optimizer.__name__, PYTHONPATH=path)


def counting(kv):
    """The weight after each of four steps; without ``kv`` in one process, for two workers."""
    optimizer = own_optimizer.Counting(learning_rate=0.25)
    weight = mx.nd.ones((SIZE,))
    update = mx.optimizer.get_updater(optimizer)
    if kv is not None:
        kv.set_optimizer(optimizer)
        kv.init("w", weight)
    history = []
    for step in range(4):
        optimizer.pace = 1.0 if step < 2 else 0.5
        pushed = mx.nd.arange(SIZE) - 4 * step
        if kv is None:
            update("w", 2 * pushed, weight)
        else:
            kv.pushpull("w", pushed, out=weight)
        history.append(weight.asnumpy())
    return history


def counting_on_the_servers():
    return counting(mx.kv.create(STORE)), counting(None)


def test_an_allowed_class_gets_whole_keys_and_keeps_its_own_counts(own):
    for found, wanted in own.run(counting_on_the_servers):
        for ours, theirs in zip(found, wanted):
            np.testing.assert_array_equal(ours, theirs)


def stumble():
    """(the error of each step of key 'b', how long the last one took, the weight of 'a')"""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(own_optimizer.Stumbling(learning_rate=0.5))
    weights = {key: mx.nd.zeros((SIZE,)) for key in ("a", "b")}
    for key, weight in weights.items():
        kv.init(key, weight)
    errors = []
    for _ in range(3):
        for key, weight in weights.items():
            kv.pushpull(key, mx.nd.ones((SIZE,)), out=weight)
        began = time.monotonic()
        try:
            weights["b"].wait_to_read()
            errors.append(None)
        except mx.base.MXNetError as error:
            errors.append(str(error))
    took = time.monotonic() - began
    return errors, took, raised(kv.push, "b", weights["a"]), weights["a"].asnumpy()


def test_an_update_that_raises_is_an_error_on_every_rank(own):
    for errors, took, later, other in own.run(stumble):
        assert errors[:2] == [None, None]
        for told in (errors[2], later):
            assert "'b'" in told and "ArithmeticError: it stumbled" in told
        assert took < 10
        assert (other == -3).all()


# ---- more than one set_optimizer


def adam(**settings):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.25)
    settings = {"learning_rate": 0.25, "lr_scheduler": schedule, **settings}
    return mx.optimizer.Adam(**settings)


def in_turns(kv, call):
    """Call it on one rank after the other; what each got."""
    for rank in range(kv.num_workers):
        kv.barrier()
        if rank == kv.rank:
            result = call()
    kv.barrier()
    return result


def set_it_again_and_again():
    kv = mx.kv.create(STORE)
    # ranks whose batches differ; rank 0's counts
    in_turns(kv, lambda: kv.set_optimizer(adam(rescale_grad=1 / (1 + kv.rank))))
    weight = mx.nd.ones((SIZE,))
    kv.init("w", weight)
    for step in range(6):
        if step in (2, 4):
            in_turns(kv, lambda: kv.set_optimizer(adam()))
        kv.pushpull("w", mx.nd.arange(SIZE) / 2, out=weight)
    return weight.asnumpy()


def test_the_same_optimizer_again_keeps_the_states(pair):
    update, weight = mx.optimizer.get_updater(adam()), mx.nd.ones((SIZE,))
    for _ in range(6):
        update("w", mx.nd.arange(SIZE), weight)
    for found in pair.run(set_it_again_and_again):
        np.testing.assert_array_equal(found, weight.asnumpy())


def different(kind):
    kv = mx.kv.create(STORE)
    others = {
        "number": lambda: adam(beta1=0.5),
        "rate": lambda: mx.optimizer.Adam(learning_rate=0.5),
        "schedule": lambda: adam(learning_rate=0.5),
        "class": lambda: mx.optimizer.SGD(learning_rate=0.25),
    }

    def set_one():
        if kv.rank == 0:
            return kv.set_optimizer(adam())
        return raised(kv.set_optimizer, others[kind]())

    first = in_turns(kv, set_one)
    if kv.rank == 0:  # and by the same rank
        first = raised(kv.set_optimizer, others[kind]())
    kv.set_optimizer(adam())
    weight = mx.nd.ones((SIZE,))
    kv.init("w", weight)
    kv.pushpull("w", weight, out=weight)
    return first, weight.asnumpy()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("number", "beta1 is 0.5 here, 0.9 there"),
        ("rate", "lr is 0.5 here, 0.25 there"),
        ("schedule", "lr_scheduler.base_lr is 0.5 here, 0.25 there"),
        ("class", "class is 'SGD' here, 'Adam' there"),
    ],
)
def test_another_optimizer_is_an_error_that_names_what_differs(kind, named, pair):
    for told, weight in pair.run(different, kind):
        assert named in told and "apply Adam already" in told
        assert (weight < 1).all()  # the first one is in force


# ---- loss scaling


def scaling_trainer(update_on_kvstore):
    net = gluon.nn.Dense(2, in_units=SIZE)
    net.initialize(mx.init.Constant(0.5))
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.5},
        kvstore=STORE,
        update_on_kvstore=update_on_kvstore,
    )
    return net, trainer


def scale_loss(trainer):
    """``amp.init_trainer`` without ``amp.init``, which would change this process for good."""
    amp.amp._amp_initialized = amp.amp._amp_loss_scale_initialized = True
    try:
        amp.init_trainer(trainer)
    finally:
        amp.amp._amp_initialized = False


def step_with(net, trainer, value):
    with autograd.record():
        loss = net(mx.nd.full((1, SIZE), value)).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(1)
    return net.weight.data().asnumpy()


def scale_with_update_on_the_store(after):
    net, trainer = scaling_trainer(True)
    if after:  # the store is there already
        with autograd.record():
            loss = net(mx.nd.ones((1, SIZE))).sum()
        loss.backward()
        trainer.step(1)
    scale_loss(trainer)
    return raised(step_with, net, trainer, 1.0)


@pytest.mark.parametrize("after", [False, True])
def test_dynamic_loss_scaling_with_update_on_the_store_is_refused(after, pair):
    for told in pair.run(scale_with_update_on_the_store, after):
        assert told.startswith("UsageError") and "update_on_kvstore=False" in told


def scale_with_update_on_the_worker():
    net, trainer = scaling_trainer(False)
    scale_loss(trainer)
    rank = mx.kv.create(STORE).rank
    weights = [step_with(net, trainer, 1.0)]
    weights.append(step_with(net, trainer, np.inf if rank == 1 else 1.0))
    scale = trainer._amp_loss_scaler._next_loss_scale
    weights.append(step_with(net, trainer, 1.0))
    return weights, scale


def test_every_rank_skips_the_step_that_overflowed_on_one(pair):
    for (first, second, third), scale in pair.run(scale_with_update_on_the_worker):
        assert (first == 0.5 - 0.5 * 2).all()
        assert (second == first).all()
        assert (third == first - 0.5 * 2).all()
        assert scale == 2.0**15
