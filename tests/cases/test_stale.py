"""``ignore_stale_grad=True``: a branch that this rank's, or no rank's, examples go through.

What is compared with is one process that sees the whole batch; the branch is updated there if
any example has gone through it.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STORE = "dist_sync_p3"
ROWS = 4
SGD = ("sgd", {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125})
ADAM = ("adam", {"learning_rate": 0.125, "epsilon": 1e-3, "wd": 0.125})
#: for each step, which of the batch's rows go through the branch: the first two are rank 0's
THROUGH = [(), (2, 3), (0, 1, 2, 3), (1,), (), (), (3,), (0, 2)]


def examples(step, rows):
    numbers = np.random.RandomState(step).randint(-4, 5, (ROWS, 4))
    return mx.nd.array(numbers[list(rows)] / 4)


def update(trainer, how):
    if how == "step":
        trainer.step(ROWS, ignore_stale_grad=True)
    else:
        trainer.allreduce_grads()
        trainer.update(ROWS, ignore_stale_grad=True)


def train(kvstore, rows, how, optimizer, update_on_kvstore, grad_req, contexts=1):
    """The weights after each step; each context takes its share of the rows."""
    devices = [mx.cpu(i) for i in range(contexts)]
    trunk, branch = (gluon.nn.Dense(3, in_units=4) for _ in range(2))
    params = [*trunk.collect_params().values(), *branch.collect_params().values()]
    for param in params:
        param.grad_req = grad_req
        param.initialize(mx.init.Constant(0.25), ctx=devices)
    trainer = gluon.Trainer(
        params, *optimizer, kvstore=kvstore, update_on_kvstore=update_on_kvstore
    )
    seen = []
    for step, through in enumerate(THROUGH):
        losses = []
        for device, share in zip(devices, np.array_split(rows, contexts)):
            with autograd.record():
                loss = trunk(examples(step, share).as_in_context(device)).sum()
                chosen = [row for row in share if row in through]
                if chosen:
                    loss = loss + branch(examples(step, chosen).as_in_context(device)).sum()
                losses.append(loss)
        autograd.backward(losses)
        update(trainer, how)
        if grad_req == "add":
            for param in params:
                param.zero_grad()
        for param in params:
            seen += [array.asnumpy() for array in param.list_data()]
    return seen


def train_half(kvstore, *args):
    rank = mx.kv.create(STORE).rank
    return train(kvstore, range(2 * rank, 2 * rank + 2), *args)


@pytest.mark.parametrize(
    ("job", "how", "optimizer", "update_on_kvstore", "grad_req"),
    [
        ("pair", "step", SGD, None, "write"),
        ("pair", "step", ADAM, None, "write"),
        ("pair", "step", SGD, None, "add"),
        ("pair", "step", SGD, False, "write"),
        ("pair", "step", ADAM, False, "write"),
        ("pair", "update", SGD, False, "write"),
        ("pair", "update", ADAM, False, "add"),
        ("naive", "step", SGD, None, "write"),
        ("naive", "update", SGD, False, "write"),
    ],
)
def test_a_branch_is_updated_where_some_rank_has_used_it(
    job, how, optimizer, update_on_kvstore, grad_req, request
):
    args = (how, optimizer, update_on_kvstore, grad_req)
    expected = train(None, range(ROWS), *args)
    for result in request.getfixturevalue(job).run(train_half, STORE, *args):
        for got, right in zip(result, expected):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_a_branch_that_one_of_a_ranks_devices_has_used(pair, update_on_kvstore):
    args = ("step", SGD, update_on_kvstore, "write")
    expected = train(None, range(ROWS), *args)
    expected = [array for array in expected for _ in range(2)]
    for result in pair.run(train_half, STORE, *args, 2):
        for got, right in zip(result, expected):
            np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)


def train_alone(kvstore, *args):
    return train(kvstore, range(ROWS), *args)


@pytest.mark.parametrize("store", [STORE, "dist_async_p3"])
def test_one_worker(single, store):
    args = ("step", SGD, None, "write")
    (result,) = single.run(train_alone, store, *args)
    for got, right in zip(result, train_alone(None, *args)):
        np.testing.assert_array_equal(got, right)


def use_a_branch_on_rank_1_alone():
    """Gradients are one, so each push moves the weights by one."""
    store = mx.kv.create("dist_async_p3")
    param = gluon.Parameter("w", shape=(20,))
    param.initialize(mx.init.Constant(100))
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": 1}, kvstore=store)
    for _ in range(3):
        if store.rank == 1:
            with autograd.record():
                loss = param.data().sum()
            loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        mx.nd.waitall()
    store.barrier()
    trainer.step(1, ignore_stale_grad=True)  # of nothing new
    return param.data().asnumpy().tolist()


def test_asynchronous_ranks_push_what_they_have_used_and_get_what_the_others_have(pair):
    assert pair.run(use_a_branch_on_rank_1_alone) == [[97.0] * 20] * 2


def forget_a_branch():
    net, other = (gluon.nn.Dense(2, in_units=4) for _ in range(2))
    params = [*net.collect_params().values(), *other.collect_params().values()]
    for param in params:
        param.initialize()
    trainer = gluon.Trainer(params, *SGD, kvstore=STORE)
    with autograd.record():
        loss = net(examples(0, range(ROWS))).sum()
    loss.backward()
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(ROWS)


def test_without_it_an_unused_branch_is_an_error_as_in_one_process(pair):
    pair.run(forget_a_branch)


def train_rows(kvstore, stype):
    """Two embeddings with row-sparse gradients, the second used at two of four steps."""
    both = [
        gluon.Parameter("first", shape=(6, 3), stype=stype, grad_stype="row_sparse"),
        gluon.Parameter("second", shape=(6, 3), grad_stype="row_sparse"),
    ]

    def weight(param):
        sparse = param._stype == "row_sparse"
        return param.row_sparse_data(mx.nd.arange(6, dtype="int64")) if sparse else param.data()

    for param in both:
        param.initialize(mx.init.One())
    trainer = gluon.Trainer(both, *SGD, kvstore=kvstore)
    seen = []
    for step in range(4):
        if step == 2:
            both[0].set_data(mx.nd.full((6, 3), 7).tostype(stype))
        ids = mx.nd.array([step, step + 1])
        with autograd.record():
            loss = mx.nd.Embedding(ids, weight(both[0]), 6, 3, sparse_grad=True).sum()
            if step % 2:
                loss = loss + mx.nd.Embedding(ids, weight(both[1]), 6, 3, sparse_grad=True).sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        seen += [weight(param).asnumpy() for param in both]
    return seen


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
def test_row_sparse_gradients_and_weights(single, stype):
    (result,) = single.run(train_rows, STORE, stype)
    for got, right in zip(result, train_rows(None, "default")):
        np.testing.assert_array_equal(got, right)
