"""Optimizer states in files: written by a job, read by local MXNet and by jobs of other sizes."""

from __future__ import annotations

import pickle

import mxnet as mx
import numpy as np
import pytest

from p3.errors import UsageError

STORE = "dist_sync_p3"
SHAPES = [(5, 4), (1,), (30,)]  # of keys 0, 1, "w", with slices of 8 elements
KEYS = [0, 1, "w"]
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125},
    "adam": {"learning_rate": 0.25},
    "ftml": {"learning_rate": 0.25},
    "lamb": {"learning_rate": 0.25},
}


def optimizer(name):
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[3, 7], factor=0.5)
    fields = {**OPTIMIZERS[name], "lr_scheduler": schedule}
    return mx.optimizer.create(name, **fields)


def gradient(place, step):
    size = int(np.prod(SHAPES[place]))
    values = ((np.arange(size) * 7 + 5 * step + place) % 11 - 5) / 8
    return mx.nd.array(values.reshape(SHAPES[place]))


def local(name, steps):
    """``(updater, weights)`` after some steps in one process, two workers' gradients added."""
    updater = mx.optimizer.get_updater(optimizer(name))
    weights = [mx.nd.ones(shape) for shape in SHAPES]
    for step in range(steps):
        for place, key in enumerate(KEYS):
            updater(key, 2 * gradient(place, step), weights[place])
    return updater, [weight.asnumpy() for weight in weights]


def steps_of(kv, weights, steps):
    for step in steps:
        for place, key in enumerate(KEYS):
            kv.pushpull(key, gradient(place, step) * (2 / kv.num_workers), out=weights[place])


def first_half(name, path, dump):
    kv = mx.kv.create(STORE)
    kv.set_optimizer(optimizer(name))
    weights = [mx.nd.ones(shape) for shape in SHAPES]
    kv.broadcast(KEYS, weights, out=weights)
    steps_of(kv, weights, range(5))
    kv.save_optimizer_states(str(path), dump_optimizer=dump)
    return [weight.asnumpy() for weight in weights]


def second_half(name, path, weights):
    kv = mx.kv.create(STORE)
    kv.set_optimizer(optimizer(name))
    weights = [mx.nd.array(weight) for weight in weights]
    kv.broadcast(KEYS, weights, out=weights)
    kv.load_optimizer_states(str(path))
    steps_of(kv, weights, range(5, 10))
    return [weight.asnumpy() for weight in weights]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_in_two_jobs_are_ten_in_a_row(name, pair, single, tmp_path):
    path = tmp_path / "states"
    halfway = pair.run(first_half, name, path, True)[0]
    (ours,) = single.run(second_half, name, path, halfway)
    _, expected = local(name, 10)
    for got, wanted in zip(ours, expected):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dump", [True, False])
def test_mxnets_own_updater_reads_the_file(dump, pair, tmp_path):
    path = tmp_path / "states"
    weights = [mx.nd.array(weight) for weight in pair.run(first_half, "adam", path, dump)[1]]
    updater, _ = local("adam", 5 if not dump else 0)  # without the optimizer, its own counts
    updater.set_states(path.read_bytes())
    for step in range(5, 10):
        for place, key in enumerate(KEYS):
            updater(key, 2 * gradient(place, step), weights[place])
    _, expected = local("adam", 10)
    for got, wanted in zip(weights, expected):
        np.testing.assert_array_equal(got.asnumpy(), wanted)


def go_on_from_local(path):
    return second_half("sgd", path, local("sgd", 5)[1])


def test_a_file_of_local_training_is_read(pair, tmp_path):
    path = tmp_path / "states"
    path.write_bytes(local("sgd", 5)[0].get_states(dump_optimizer=True))
    _, expected = local("sgd", 10)
    for ours in pair.run(go_on_from_local, path):
        for got, wanted in zip(ours, expected):
            np.testing.assert_array_equal(got, wanted)


def train(kvstore, steps, path=None, resume=False):
    net = mx.gluon.nn.Dense(3, in_units=6)
    net.initialize(mx.init.Constant(0.25))
    fields = {"learning_rate": 0.25, "lr_scheduler": mx.lr_scheduler.FactorScheduler(3, 0.5)}
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", fields, kvstore=kvstore)
    if resume:
        net.load_parameters(f"{path}.params")
        trainer.load_states(f"{path}.states")
    for step in steps:
        data = mx.nd.array((np.arange(12).reshape(2, 6) + step) % 5 / 8)
        with mx.autograd.record():
            loss = (net(data) ** 2).sum()
        loss.backward()
        trainer.step(2 * (2 if kvstore == STORE else 1))
    if path and not resume:
        net.save_parameters(f"{path}.params")
        trainer.save_states(f"{path}.states")
    return net.weight.data().asnumpy(), trainer.learning_rate


def resume_through_trainer(path):
    rank = mx.kv.create(STORE).rank
    train(STORE, range(5), f"{path}{rank}")
    mx.kv.create(STORE).barrier()
    return train(STORE, range(5, 10), f"{path}{rank}", resume=True)


def test_through_trainer(pair, tmp_path):
    expected, rate = train("device", range(10))
    for ours, our_rate in pair.run(resume_through_trainer, tmp_path / "t"):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        assert our_rate == rate


def pushes_of_two_ranks(path):
    kv = mx.kv.create("dist_async_p3")
    kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.25))
    weight = mx.nd.zeros((20,))
    kv.broadcast("w", weight, out=weight)
    for rank, pushes in ((0, 6), (1, 2)):
        kv.barrier()
        for _ in range(pushes if kv.rank == rank else 0):
            kv.pushpull("w", mx.nd.ones((20,)), out=weight)
            weight.wait_to_read()
    kv.barrier()
    kv.save_optimizer_states(f"{path}{kv.rank}", dump_optimizer=True)


def test_updates_of_an_asynchronous_key_are_counted_whoever_made_them(pair, tmp_path):
    pair.run(pushes_of_two_ranks, tmp_path / "states")
    for rank in range(2):
        _, optimizer = pickle.loads((tmp_path / f"states{rank}").read_bytes())
        assert optimizer._index_update_count == {"w": 8}
        assert optimizer.num_update == 8


class Trap:
    def __reduce__(self):
        return (print, ("opened",))


def what_cannot_be_loaded(folder):
    kv = mx.kv.create(STORE)
    with pytest.raises(UsageError, match="no optimizer"):
        kv.save_optimizer_states(f"{folder}/none")
    kv.set_optimizer(optimizer("sgd"))
    for name, match in (("trap", "print"), ("list", "dict"), ("noise", "cannot be loaded")):
        with pytest.raises(UsageError, match=match):
            kv.load_optimizer_states(f"{folder}/{name}")


def test_other_files_are_refused(single, tmp_path):
    (tmp_path / "trap").write_bytes(pickle.dumps({0: Trap()}))
    (tmp_path / "list").write_bytes(pickle.dumps([1]))
    (tmp_path / "noise").write_bytes(b"\x80\x04nothing")
    single.run(what_cannot_be_loaded, tmp_path)
