"""Optimizers on the servers, beside the same optimizer in one process."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
SHAPES = {"cut": (5, 8), "scalar": (1,)}  # five slices of eight, and a single element


# ---- no optimizer


def sums_without_an_optimizer():
    kv = mx.kv.create(STORE)
    kv.init("w", mx.nd.ones((20,)))
    found = [mx.nd.empty((20,)) for _ in range(4)]
    kv.pull("w", out=found[0])
    for out in found[1:3]:
        kv.push("w", mx.nd.full((20,), kv.rank + 1))
        kv.pull("w", out=out)
    kv.pull("w", out=found[3])
    return [array.asnumpy() for array in found]


@pytest.mark.parametrize("job", ["pair", "naive"])
def test_without_an_optimizer_a_pull_gives_the_last_rounds_sum(job, request):
    for found in request.getfixturevalue(job).run(sums_without_an_optimizer):
        for array, expected in zip(found, [1, 3, 3, 3]):
            assert (array == expected).all()


# ---- schedules and counts


def make(name):
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[2, 3], factor=0.1, base_lr=0.5)
    return mx.optimizer.create(name, learning_rate=0.5, wd=0.01, lr_scheduler=schedule)


def gradients(step, rank):
    """The same on every call; multiples of 1/8, so that sums over ranks are exact."""
    numbers = np.random.RandomState(100 * step + rank)
    return {key: mx.nd.array(numbers.randint(-40, 40, shape) / 8) for key, shape in SHAPES.items()}


def schedule_on_the_servers(name):
    """The weights after each of five steps."""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(make(name))
    weights = {key: mx.nd.ones(shape) for key, shape in SHAPES.items()}
    for key, weight in weights.items():
        kv.init(key, weight)
    history = []
    for step in range(5):
        for key, gradient in gradients(step, kv.rank).items():
            kv.pushpull(key, gradient, out=weights[key])
        history.append({key: weight.asnumpy() for key, weight in weights.items()})
    return history


def schedule_in_one_process(name, ranks):
    updater = mx.optimizer.get_updater(make(name))
    weights = {key: mx.nd.ones(shape) for key, shape in SHAPES.items()}
    history = []
    for step in range(5):
        for key, weight in weights.items():
            updater(key, sum(gradients(step, rank)[key] for rank in range(ranks)), weight)
        history.append({key: weight.asnumpy() for key, weight in weights.items()})
    return history


@pytest.mark.parametrize("job", ["single", "pair"])
@pytest.mark.parametrize("name", ["adam", "ftml", "sgd"])
def test_a_schedule_advances_once_a_step_however_many_slices_a_key_has(job, name, request):
    results = request.getfixturevalue(job).run(schedule_on_the_servers, name)
    expected = schedule_in_one_process(name, len(results))
    for history in results:
        for step, (found, wanted) in enumerate(zip(history, expected)):
            for key in SHAPES:
                np.testing.assert_array_equal(found[key], wanted[key], f"{key}, step {step}")


# ---- a script that changes its learning rate


def change_the_learning_rate(kvstore, rank=None):
    """The weights after each step: three steps, three at rate 0, two at rate 1.

    ``rank``: whose half of the batch to see; ``None``: all of it.
    """
    net = gluon.nn.Dense(3, in_units=11)
    net.initialize(mx.init.Constant(0.5))
    settings = {"learning_rate": 0.25, "momentum": 0.5}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kvstore)
    batch = mx.nd.array(np.random.RandomState(5).randint(-8, 8, (4, 11)) / 8)
    seen = batch if rank is None else batch[2 * rank : 2 * rank + 2]
    history = []
    for rate in [0.25] * 3 + [0.0] * 3 + [1.0] * 2:
        trainer.set_learning_rate(rate)
        with autograd.record():
            loss = (net(seen) ** 2).sum() / 64
        loss.backward()
        trainer.step(1)
        history.append([p.data().asnumpy() for p in net.collect_params().values()])
    return history


def change_it_with_the_store(share):
    rank = mx.kv.create(STORE).rank
    return change_the_learning_rate(STORE, rank if share else None)


def test_a_changed_learning_rate_takes_effect_at_once_and_momentum_stays(single):
    expected = change_the_learning_rate(None)
    [history] = single.run(change_it_with_the_store, False)
    for found, wanted in zip(history, expected):
        for array, other in zip(found, wanted):
            np.testing.assert_array_equal(array, other)


def test_two_workers_with_half_a_batch_each_follow_one_with_all_of_it(pair):
    expected = change_the_learning_rate(None)
    for history in pair.run(change_it_with_the_store, True):
        for found, wanted in zip(history, expected):
            for array, other in zip(found, wanted):
                np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


# ---- without a launcher


def embedded():
    kv = mx.kv.create(STORE)
    assert (kv.rank, kv.num_workers, kv.type) == (0, 1, STORE)
    return (
        schedule_on_the_servers("adam"),
        change_the_learning_rate(STORE),
        sums_without_an_optimizer(),
    )


def test_the_store_in_one_process_gives_the_numbers_of_mxnets_own(alone):
    schedule, rates, sums = alone(embedded)
    for found, wanted in zip(schedule, schedule_in_one_process("adam", 1)):
        for key in SHAPES:
            np.testing.assert_array_equal(found[key], wanted[key])
    for found, wanted in zip(rates, change_the_learning_rate(None)):
        for array, other in zip(found, wanted):
            np.testing.assert_array_equal(array, other)
    assert [array[0] for array in sums] == [1, 1, 1, 1]
