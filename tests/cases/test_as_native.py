"""What scripts written for MXNet's own stores take for granted."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3.errors import P3Error, UnknownKeyError, UsageError

STORE = "dist_sync_p3"
SIZE = 20


# ---- errors are MXNet's


def wrong_calls():
    kv = mx.kv.create(STORE)
    kv.init("here", mx.nd.zeros((4, 5)))
    dense, rows = mx.nd.zeros((4, 5)), mx.nd.arange(2)
    calls = {
        "pull": lambda: kv.pull("nowhere", out=dense),
        "push": lambda: kv.push("nowhere", dense),
        "row_sparse_pull": lambda: kv.row_sparse_pull("here", out=dense, row_ids=rows),
        "shape": lambda: kv.push("here", mx.nd.zeros((5, 4))),
    }
    caught = {}
    for name, call in calls.items():
        try:
            call()
        except mx.MXNetError as error:
            caught[name] = type(error)
    return caught


def test_a_script_that_catches_mxnets_error_catches_p3s(single):
    (caught,) = single.run(wrong_calls)
    assert caught == {
        "pull": UnknownKeyError,
        "push": UnknownKeyError,
        "row_sparse_pull": UsageError,
        "shape": UsageError,
    }
    assert issubclass(P3Error, mx.MXNetError)
    assert issubclass(UsageError, ValueError) and issubclass(UnknownKeyError, KeyError)


# ---- a call with several keys reads all values before it writes any


def keys_that_share_arrays():
    kv = mx.kv.create(STORE)
    keys = ["a", "b", "c"]
    kv.init(keys, [mx.nd.zeros((SIZE,))] * 3)
    found = []
    shared = mx.nd.full((SIZE,), kv.rank + 1.0)
    kv.pushpull(keys, [shared] * 3)
    found.append(shared.asnumpy())
    first, second = mx.nd.full((SIZE,), 10.0), mx.nd.full((SIZE,), 20.0)
    out = mx.nd.zeros((SIZE,))
    kv.pushpull(keys, [first, second, first], out=[second, first, out])
    found += [second.asnumpy(), first.asnumpy(), out.asnumpy()]
    buffer = mx.nd.ones((2 * SIZE,))  # views of one buffer
    kv.pushpull(keys[:2], [buffer[:SIZE], buffer[SIZE:]])
    return [*found, buffer.asnumpy()]


def test_pushpull_of_a_list_takes_the_values_as_they_were(pair):
    for found in pair.run(keys_that_share_arrays):
        assert [set(values.tolist()) for values in found] == [{3.0}, {20.0}, {40.0}, {20.0}, {2.0}]


# ---- inside autograd.record()


class SparseFirst(mx.gluon.Block):
    """A row-sparse weight, which the first forward pass pulls, and a dense one of later shape."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.rows = self.params.get(
                "rows", shape=(6, 3), stype="row_sparse", grad_stype="row_sparse"
            )
            self.dense = mx.gluon.nn.Dense(1, use_bias=False)

    def forward(self, ids):
        rows = self.rows.row_sparse_data(ids)
        return self.dense(mx.nd.Embedding(ids, rows, 6, 3, sparse_grad=True))


def first_forward_is_recorded():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = SparseFirst()
    net.initialize(mx.init.One(), ctx=devices)
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=mx.kv.create(STORE)
    )
    parts = [mx.nd.array([[device.device_id, 4]], ctx=device) for device in devices]
    with mx.autograd.record():
        outputs = [net(part) for part in parts]
    mx.autograd.backward(outputs)
    trainer.step(2)
    return net.rows.row_sparse_data(mx.nd.arange(6)).asnumpy()


def test_trainer_makes_its_keys_inside_the_first_recorded_forward_pass(pair):
    for rows in pair.run(first_forward_is_recorded):
        expected = np.ones((6, 3))
        expected[[0, 1]] -= 2 * 1 / 2  # one device on each of two ranks, batch 2
        expected[4] -= 4 * 1 / 2
        np.testing.assert_array_equal(rows, expected)


# ---- the updater's states


def states_of_the_servers():
    kv = mx.kv.create(STORE)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    weight = mx.nd.zeros((SIZE,))
    kv.init(7, weight)
    before = kv._updater.states
    for _ in range(2):
        kv.pushpull(7, mx.nd.ones((SIZE,)), out=weight)
    after = kv._updater.states
    after[7][:] *= 1  # a copy, and arrays of MXNet's
    return before, {key: state.asnumpy() for key, state in after.items()}


def test_the_states_that_the_updater_shows_are_the_servers(pair):
    for before, after in pair.run(states_of_the_servers):
        assert before == {} and list(after) == [7]
        np.testing.assert_array_equal(after[7], -2 * (1 + 0.5))


# ---- loaded row-sparse weights


def load_rows(folder):
    kv = mx.kv.create(STORE)
    file = f"{folder}/{kv.rank}.params"
    params = mx.gluon.ParameterDict()
    weight = params.get("w", shape=(4, 3), stype="row_sparse", grad_stype="row_sparse")
    params.initialize(init="ones")
    trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=kv)
    ids = mx.nd.arange(4)
    params.save(file)
    seen = []
    for _ in range(5):
        with mx.autograd.record():
            rows = weight.row_sparse_data(ids)
            loss = (rows * rows).sum()
        seen.append(rows.asnumpy().copy())
        loss.backward()
        trainer.step(4)
        seen.append(weight.row_sparse_data(ids).asnumpy())
        params.load(file)
    return seen


@pytest.mark.parametrize("job", ["single", "pair"])
def test_every_rank_reads_the_rows_that_were_loaded(job, request, tmp_path):
    results = request.getfixturevalue(job).run(load_rows, str(tmp_path))
    for seen in results:
        for rows, moved in zip(seen[::2], seen[1::2]):
            np.testing.assert_array_equal(rows, 1)
            np.testing.assert_array_equal(moved, 1 - len(results) * 2 / 4)
