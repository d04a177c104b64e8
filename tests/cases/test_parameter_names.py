"""The same parameter on all ranks, whatever each of them calls it."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
SIZE = 20


def layers(first, prefix=None):
    """Two layers of one size, called dense<first> and dense<first + 1>."""
    made = []
    with mx.name.NameManager():
        for _ in range(first):
            gluon.nn.Dense(3)
        for number in range(2):
            layer = gluon.nn.Dense(4, in_units=4, prefix=prefix and f"{prefix[number]}_")
            layer.initialize(mx.init.Constant((number + 1) / 4))
            made.append(layer)
    return made


def train(kvstore, rows, first, update_on_kvstore=None, prefix=None, states=None):
    net = gluon.nn.Sequential(prefix="")
    net.add(*layers(first, prefix))
    net[1].weight.lr_mult = 0.5
    settings = {"learning_rate": 0.5, "momentum": 0.5}
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", settings, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    for step in range(3):
        numbers = np.random.RandomState(step).randint(-4, 5, (4, 4))
        with autograd.record():
            loss = net(mx.nd.array(numbers[rows] / 4)).sum()
        loss.backward()
        trainer.step(4)
    return [param.data().asnumpy() for layer in net for param in (layer.weight, layer.bias)]


def train_with_a_layer_more_on_some_rank(firsts, update_on_kvstore):
    rank = mx.kv.create(STORE).rank
    return train(STORE, slice(2 * rank, 2 * rank + 2), firsts[rank], update_on_kvstore)


@pytest.mark.parametrize("firsts", [(8, 9), (9, 8), (9, 10), (98, 99), (0, 9)])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_layers_numbered_otherwise_are_the_same_layers(pair, firsts, update_on_kvstore):
    expected = train(None, slice(0, 4), 0)
    for result in pair.run(train_with_a_layer_more_on_some_rank, firsts, update_on_kvstore):
        for got, right in zip(result, expected):
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)


def train_what_has_other_names(prefixes):
    rank = mx.kv.create(STORE).rank
    with pytest.raises(ValueError) as caught:
        train(STORE, slice(0, 2), 0, prefix=prefixes[rank])
    return str(caught.value)


def test_what_cannot_be_matched_is_refused_on_all_ranks(pair):
    prefixes = (("left", "right"), ("centre", "left"))
    first, second = pair.run(train_what_has_other_names, prefixes)
    assert "refused on rank 1" in first
    assert "'centre_bias'" in second and "'left_bias'" in second


def train_a_layer_more_on_rank_1():
    net, more = layers(0)
    params = [net.weight, net.bias]
    if mx.kv.create(STORE).rank == 1:
        params += [more.weight]
    trainer = gluon.Trainer(params, "sgd", kvstore=STORE)
    with autograd.record():
        loss = (net(mx.nd.ones((1, 4))) + more(mx.nd.ones((1, 4)))).sum()
    loss.backward()
    with pytest.raises(ValueError) as caught:
        trainer.step(1)
    return str(caught.value)


def test_a_parameter_that_only_one_rank_trains_is_refused_on_all_ranks(pair):
    first, second = pair.run(train_a_layer_more_on_rank_1)
    assert "refused on rank 1" in first
    assert "3 parameters and rank 0 2" in second and "'dense1_weight'" in second


def module_step(firsts):
    """One step of a Module; rank r has made ``firsts[r]`` layers before."""
    rank = mx.kv.create(STORE).rank
    with mx.name.NameManager():
        for _ in range(firsts[rank]):
            mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
        network = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3)
        network = mx.sym.FullyConnected(network, num_hidden=3)
    module = mx.mod.Module(network, label_names=[])
    module.bind([("data", (2, 3))])
    module.init_params()
    module.init_optimizer(kvstore=STORE)


def refused_module_step(firsts):
    with pytest.raises(ValueError) as caught:
        module_step(firsts)
    return str(caught.value)


def test_a_modules_names_must_be_alike(pair):
    pair.run(module_step, (1, 1))
    first, second = pair.run(refused_module_step, (1, 2))
    assert "refused on rank 1" in first
    assert "'fullyconnected3_bias'" in second and "'fullyconnected1_bias'" in second


def initialise_in_another_order():
    store = mx.kv.create(STORE)
    names = ["a", "b", "c"] if store.rank == 0 else ["c", "b", "a"]
    arrays = {name: mx.nd.full((SIZE,), ord(name) - 96) for name in "abc"}
    for name in names:
        store.broadcast(name, arrays[name], out=arrays[name])
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    for name in reversed(names):
        store.pushpull(name, mx.nd.full((SIZE,), 10 * (ord(name) - 96)), out=arrays[name])
    return [arrays[name].asnumpy().tolist() for name in "abc"]


def test_string_keys_may_be_initialised_in_any_order(pair):
    expected = [[1.0 - 20] * SIZE, [2.0 - 40] * SIZE, [3.0 - 60] * SIZE]
    assert pair.run(initialise_in_another_order) == [expected, expected]
