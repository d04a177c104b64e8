"""Weights set in the middle of training: they take effect, on every rank."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
SGD = {"learning_rate": 0.5, "momentum": 0.5}
LOADED = 8.0


def make_net():
    net = gluon.nn.Dense(5, in_units=4, prefix="dense_")
    net.initialize(mx.init.Constant(1))
    return net


def assert_same(arrays, expected):
    for got, right in zip(arrays, expected):
        np.testing.assert_array_equal(got, right)


@pytest.fixture
def saved(tmp_path):
    """A file of weights that are all ``LOADED``."""
    net = make_net()
    for param in net.collect_params().values():
        param.set_data(mx.nd.full(param.shape, LOADED))
    net.save_parameters(str(tmp_path / "net.params"))
    return str(tmp_path / "net.params")


def load(net, how, path):
    if how == "load_parameters":
        net.load_parameters(path)
    elif how == "set_data":
        for param in net.collect_params().values():
            param.set_data(mx.nd.full(param.shape, LOADED))
    else:
        net.initialize(mx.init.Constant(LOADED), force_reinit=True)
        net.bias.set_data(mx.nd.full(net.bias.shape, LOADED))  # Dense begins it with zeros


def train(kvstore, rank, path, how, loading_ranks, update_on_kvstore=None):
    """Weights after each of four steps; some ranks load others before the third.

    The gradient does not depend on the weights, so it is the same on all ranks.
    """
    net = make_net()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", SGD, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    seen = []
    for step in range(4):
        if step == 2 and rank in loading_ranks:
            load(net, how, path)
            assert (net.weight.data().asnumpy() == LOADED).all()
        with autograd.record():
            loss = net(mx.nd.full((1, 4), step)).sum()
        loss.backward()
        trainer.step(1 if kvstore is None else 2)
        seen += [net.weight.data().asnumpy(), net.bias.data().asnumpy()]
    return seen


def train_on_a_rank(*args):
    return train(STORE, mx.kv.create(STORE).rank, *args)


@pytest.mark.parametrize("how", ["load_parameters", "set_data", "initialize"])
@pytest.mark.parametrize("loading_ranks", [(0, 1), (0,)])
def test_loaded_weights_count(pair, saved, how, loading_ranks):
    expected = train(None, 0, saved, how, (0,))
    for result in pair.run(train_on_a_rank, saved, how, loading_ranks):
        assert_same(result, expected)


def test_they_do_where_workers_update(pair, saved):
    expected = train(None, 0, saved, "load_parameters", (0,))
    for result in pair.run(train_on_a_rank, saved, "load_parameters", (0, 1), False):
        assert_same(result, expected)


def test_what_rank_1_alone_has_loaded_does_not_count(pair, saved):
    expected = train(None, 0, saved, "set_data", ())
    for result in pair.run(train_on_a_rank, saved, "set_data", (1,)):
        assert_same(result, expected)


def load_before_the_first_step(path):
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=STORE)
    net.load_parameters(path)
    with autograd.record():
        loss = net(mx.nd.zeros((1, 4))).sum()
    loss.backward()
    trainer.step(2)
    return net.weight.data().asnumpy()


def test_weights_loaded_before_the_first_step(pair, saved):
    for weight in pair.run(load_before_the_first_step, saved):
        assert (weight == LOADED).all()


# ---- Module


def make_module(kvstore):
    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="dense")
    module = mx.mod.Module(mx.sym.MakeLoss(dense.sum()), label_names=[])
    module.bind([("data", (1, 4))])
    module.init_params(mx.init.Constant(1))
    settings = {**SGD, "rescale_grad": 1 if kvstore is None else 0.5}
    module.init_optimizer(kvstore=kvstore, optimizer_params=settings)
    return module


def load_into(module, how):
    values = {
        name: mx.nd.full(array.shape, LOADED) for name, array in module.get_params()[0].items()
    }
    if how == "some":
        del values["dense_bias"]
        module.set_params(values, {}, allow_missing=True)
    elif how == "init_params":
        module.init_params(arg_params=values, aux_params={}, force_init=True)
    else:
        module.set_params(values, {})


def train_a_module(kvstore, how):
    module, seen = make_module(kvstore), []
    for step in range(4):
        if step == 2:
            load_into(module, how)
        module.forward_backward(mx.io.DataBatch([mx.nd.full((1, 4), step)], []))
        module.update()
        weights, _ = module.get_params()
        seen += [weights[name].asnumpy() for name in ("dense_weight", "dense_bias")]
    return seen


@pytest.mark.parametrize("how", ["all", "some", "init_params"])
def test_parameters_set_in_a_module_count(pair, how):
    expected = train_a_module(None, how)
    for result in pair.run(train_a_module, STORE, how):
        assert_same(result, expected)


def fit_two_epochs_and_count_replacements():
    import p3.store

    replaced, original = [], p3.store.P3KVStore.replace
    p3.store.P3KVStore.replace = lambda self, key, value: replaced.append(key)
    try:
        data = mx.io.NDArrayIter(mx.nd.ones((2, 4)), mx.nd.ones((2, 5)), label_name="label")
        dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="dense")
        network = mx.sym.LinearRegressionOutput(dense, mx.sym.var("label"))
        module = mx.mod.Module(network, label_names=["label"])
        module.fit(data, kvstore="dist_async_p3", num_epoch=2, eval_metric="mse")
    finally:
        p3.store.P3KVStore.replace = original
    return replaced


def test_what_fit_sets_after_each_epoch_undoes_no_other_ranks_updates(pair):
    assert pair.run(fit_two_epochs_and_count_replacements) == [[], []]


# ---- keys


def initialise_twice():
    store, out = mx.kv.create(STORE), mx.nd.zeros((20,))
    store.init("w", mx.nd.ones((20,)))
    store.push("w", mx.nd.full((20,), 4))
    store.init("w", mx.nd.full((20,), 99))
    store.pull("w", out=out)
    seen = [out.asnumpy().tolist()]
    store.broadcast("w", mx.nd.full((20,), 99), out=out)
    return [*seen, out.asnumpy().tolist()]


def test_a_key_initialised_twice_keeps_its_value(pair):
    assert pair.run(initialise_twice) == [[[8.0] * 20] * 2] * 2
