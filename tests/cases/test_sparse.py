"""Row-sparse gradients and weights, against MXNet in one process with the same global batch."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3.errors import UsageError

STORE = "dist_sync_p3"
ROWS, WIDTH = 9, 5  # with slices of 8 elements, rows lie across slices and servers
IDS = {0: [[1, 1, 3], [8], [0, 1]], 1: [[3, 7], [8, 2], []]}  # by rank, a list a step
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.25},
    "adam": {"learning_rate": 0.25, "wd": 0.125},
    "adagrad": {"learning_rate": 0.5},
    "ftrl": {"learning_rate": 0.5},
    "nag": {"learning_rate": 0.5, "momentum": 0.5},
    "groupadagrad": {"learning_rate": 0.5},
}


def first_value():
    return mx.nd.arange(ROWS * WIDTH, dtype="float32").reshape((ROWS, WIDTH)) / 8


def gradient(ids, step):
    """Multiples of 1/8, so that sums are exact in any order; an id given twice counts twice."""
    total = np.zeros((ROWS, WIDTH), np.float32)
    for place, row in enumerate(ids):
        total[row] += (np.arange(WIDTH) + 1 + place + step) / 8
    dense = mx.nd.array(total)
    return mx.nd.sparse.retain(dense.tostype("row_sparse"), mx.nd.array(sorted(set(ids)) or [0]))


def local(name, fields, lists):
    """The weights after each step of one process that has all gradients."""
    update = mx.optimizer.get_updater(mx.optimizer.create(name, **fields))
    weight, seen = first_value(), []
    for step, ids in enumerate(lists):
        update(0, gradient(ids, step), weight)
        seen.append(weight.asnumpy())
    return seen


def push_rows(name, fields):
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.create(name, **fields))
    weight, seen = first_value(), []
    kv.broadcast(0, weight, out=weight)
    for step, ids in enumerate(IDS[kv.rank]):
        kv.push(0, gradient(ids, step))
        kv.pull(0, out=weight)
        seen.append(weight.asnumpy())
    return seen


@pytest.mark.parametrize(
    "name, more",
    [*((name, {}) for name in OPTIMIZERS), *((n, {"lazy_update": False}) for n in ("sgd", "adam"))],
)
def test_pushed_rows_are_updated_as_locally(single, name, more):
    fields = {**OPTIMIZERS[name], **more}
    (ours,) = single.run(push_rows, name, fields)
    for got, expected in zip(ours, local(name, fields, IDS[0])):
        np.testing.assert_array_equal(got, expected)


def local_of_two(name, fields):
    update = mx.optimizer.get_updater(mx.optimizer.create(name, **fields))
    weight, seen = first_value(), []
    for step, (mine, others) in enumerate(zip(IDS[0], IDS[1])):
        total = mx.nd.add_n(gradient(mine, step), gradient(others, step))
        update(0, total, weight)
        seen.append(weight.asnumpy())
    return seen


@pytest.mark.parametrize("name", ["sgd", "adam", "groupadagrad"])
def test_rows_of_two_ranks_are_added_up(pair, name):
    for ours in pair.run(push_rows, name, OPTIMIZERS[name]):
        for got, expected in zip(ours, local_of_two(name, OPTIMIZERS[name])):
            np.testing.assert_array_equal(got, expected)


def sum_without_an_optimizer():
    kv = mx.kv.create(STORE)
    kv.init("w", first_value())
    kv.push("w", gradient(IDS[kv.rank][0], 0))
    out = mx.nd.zeros((ROWS, WIDTH))
    kv.pull("w", out=out)
    return out.asnumpy()


def test_without_an_optimizer_rows_nobody_pushed_are_zero(pair):
    expected = (gradient(IDS[0][0], 0) + gradient(IDS[1][0], 0)).asnumpy()
    for ours in pair.run(sum_without_an_optimizer):
        np.testing.assert_array_equal(ours, expected)


def pull_rows(ids):
    kv = mx.kv.create(STORE)
    kv.init("w", first_value().tostype("row_sparse"))
    out = mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH))
    kv.row_sparse_pull("w", out=out, row_ids=mx.nd.array(ids, dtype="int64"))
    untouched = mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH))
    kv.pull("w", out=untouched)
    return out.indices.asnumpy().tolist(), out.asnumpy(), untouched.asnumpy()


@pytest.mark.parametrize("ids", [[3, 1, 3], [], [8], list(range(ROWS))[::-1]])
def test_the_rows_asked_for_come_and_no_others(pair, ids):
    expected = np.zeros((ROWS, WIDTH), np.float32)
    expected[ids] = first_value().asnumpy()[ids]
    for found, values, untouched in pair.run(pull_rows, ids):
        assert found == sorted(set(ids))
        np.testing.assert_array_equal(values, expected)
        assert not untouched.any()


def pull_rows_that_are_not_there():
    kv = mx.kv.create(STORE)
    kv.init("w", first_value())
    out = mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH))
    with pytest.raises(UsageError, match=rf"'w'.*row {ROWS} of {ROWS}"):
        kv.row_sparse_pull("w", out=out, row_ids=mx.nd.array([1, ROWS]))
    with pytest.raises(UsageError, match="row-sparse arrays as out"):
        kv.row_sparse_pull("w", out=first_value(), row_ids=mx.nd.array([1]))
    with pytest.raises(UsageError, match="row_ids"):
        kv.row_sparse_pull("w", out=out)


def test_bad_calls_are_refused_on_the_caller(single):
    single.run(pull_rows_that_are_not_there)


def embedding(kvstore, contexts, batches, sparse_weight=False):
    """Train an embedding on batches by step and context; its weights after that."""
    net = mx.gluon.nn.Embedding(ROWS, WIDTH, sparse_grad=True)
    net.initialize(mx.init.Zero(), ctx=contexts)
    net.weight.set_data(first_value())
    optimizer = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.25}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", optimizer, kvstore=kvstore)
    for parts in batches:
        with mx.autograd.record():
            losses = [
                (net(mx.nd.array(ids, ctx=context)) ** 2).sum()
                for ids, context in zip(parts, contexts)
            ]
        mx.autograd.backward(losses)
        trainer.step(4)
    return net.weight.data(contexts[0]).asnumpy()


BATCHES = [([1, 1, 3], [3, 7]), ([8], [8, 2]), ([0, 1], [5, 5])]  # by step and rank


def train_embedding():
    rank = mx.kv.create(STORE).rank
    return embedding(STORE, [mx.cpu(0)], [[parts[rank]] for parts in BATCHES])


def test_an_embedding_through_trainer_is_that_of_one_process(pair):
    expected = embedding("device", [mx.cpu(0), mx.cpu(1)], BATCHES)
    for ours in pair.run(train_embedding):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def devices_of_two_kinds(order):
    kv = mx.kv.create(STORE)
    kv.init("w", mx.nd.zeros((ROWS, WIDTH)))
    values = [gradient([1, 3], 0), mx.nd.ones((ROWS, WIDTH))][::order]
    out = mx.nd.zeros((ROWS, WIDTH))
    kv.push("w", values)
    kv.pull("w", out=out)
    return out.asnumpy()


@pytest.mark.parametrize("order", [1, -1])
def test_row_sparse_and_dense_values_of_several_devices_are_added_up(pair, order):
    expected = 2 * (gradient([1, 3], 0).asnumpy() + 1)
    for ours in pair.run(devices_of_two_kinds, order):
        np.testing.assert_array_equal(ours, expected)


def a_row_too_far():
    kv = mx.kv.create(STORE)
    kv.init("w", mx.nd.zeros((ROWS, WIDTH)))
    bad = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, WIDTH)), [ROWS]), shape=(ROWS, WIDTH))
    out = mx.nd.zeros((ROWS, WIDTH))
    kv.push("w", bad)
    kv.pull("w", out=out)
    with pytest.raises(mx.base.MXNetError, match=rf"'w'.*{ROWS}"):
        out.wait_to_read()


def test_rows_that_are_not_there_fail_the_key(single):
    single.run(a_row_too_far)


def sparse_weight(kvstore, context, batches):
    """Train an embedding whose weight is row-sparse, pulling the rows of each batch."""
    net = mx.gluon.contrib.nn.SparseEmbedding(ROWS, WIDTH)
    net.initialize(mx.init.Constant(0.5), ctx=context)
    optimizer = {"learning_rate": 0.5, "momentum": 0.5}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", optimizer, kvstore=kvstore)
    for ids in batches:
        data = mx.nd.array(ids)
        with mx.autograd.record():
            loss = (net(data) ** 2).sum()
        loss.backward()
        trainer.step(4)
    every = mx.nd.arange(ROWS, dtype="int64")
    return next(iter(net.collect_params().values())).row_sparse_data(every).asnumpy()


def train_sparse_weight(batches):
    return sparse_weight(STORE, mx.cpu(0), batches)


def test_a_row_sparse_weight_through_trainer(single):
    batches = [[1, 1, 3], [8], [0, 1]]
    (ours,) = single.run(train_sparse_weight, batches)
    np.testing.assert_array_equal(ours, sparse_weight("device", mx.cpu(0), batches))
