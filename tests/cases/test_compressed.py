"""Compressed pushes through the store and through Trainer, against ten lines of NumPy."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3.errors import UsageError

STORE = "dist_sync_p3"
SIZES = [1, 15, 16, 17, 40]


class TwoBit:
    """One worker's compression, by MXNet's definition."""

    def __init__(self, size, threshold):
        self.residual, self.threshold = np.zeros(size, np.float32), np.float32(threshold)

    def __call__(self, gradient):
        self.residual += gradient
        sent = np.zeros_like(gradient)
        sent[self.residual >= self.threshold] = self.threshold
        sent[self.residual <= -self.threshold] = -self.threshold
        self.residual -= sent
        return sent


def gradients(rank, size, steps=6):
    chance = np.random.RandomState(1000 * rank + size)
    return [chance.normal(0, 0.4, size).astype(np.float32) for _ in range(steps)]


def push_compressed(params):
    kv = mx.kv.create(STORE)
    kv.set_gradient_compression(params)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    results = []
    for size in SIZES:
        weight = mx.nd.full((size,), 0.1)  # less than the threshold: it comes as it is
        kv.broadcast(size, weight, out=weight)
        first = weight.asnumpy()
        for gradient in gradients(kv.rank, size):
            kv.pushpull(size, mx.nd.array(gradient), out=weight)
        results.append((first, weight.asnumpy()))
    return results


def test_residuals_are_each_workers_own(pair):
    both = pair.run(push_compressed, {"type": "2bit", "threshold": 0.5})
    for results in both:
        for size, (first, last) in zip(SIZES, results):
            expected = np.full(size, 0.1, np.float32)
            np.testing.assert_array_equal(first, expected)
            workers = [TwoBit(size, 0.5), TwoBit(size, 0.5)]
            for pushed in zip(gradients(0, size), gradients(1, size)):
                expected -= sum(worker(g) for worker, g in zip(workers, pushed))
            np.testing.assert_array_equal(last, expected)


def test_half_precision_pushes(pair):
    for results in pair.run(push_compressed, {"type": "fp16"}):
        for size, (_, last) in zip(SIZES, results):
            expected = np.full(size, 0.1, np.float32)
            for pushed in zip(gradients(0, size), gradients(1, size)):
                expected -= sum(g.astype(np.float16).astype(np.float32) for g in pushed)
            np.testing.assert_array_equal(last, expected)


def trained(kvstore, params, rank, ranks):
    """A linear layer's weights after some steps with ``rank``'s batches."""
    net = mx.gluon.nn.Dense(3, in_units=6, use_bias=False)
    net.initialize(mx.init.Constant(0.25))
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore, compression_params=params
    )
    for data in gradients(rank, 12):
        with mx.autograd.record():
            loss = net(mx.nd.array(data.reshape(2, 6))).sum()
        loss.backward()
        trainer.step(2 * ranks)
    return net.weight.data().asnumpy()


def train_compressed(params):
    kv = mx.kv.create(STORE)
    return trained(kv, params, kv.rank, kv.num_workers)


def test_through_trainer(pair):
    weight = np.full(18, 0.25, np.float32)
    workers = [TwoBit(18, 0.5), TwoBit(18, 0.5)]
    for batches in zip(gradients(0, 12), gradients(1, 12)):
        sums = [np.tile(batch.reshape(2, 6).sum(0), 3) for batch in batches]
        total = sum(worker(gradient) for worker, gradient in zip(workers, sums))
        weight -= np.float32(0.5) * np.float32(0.25) * total
    for ours in pair.run(train_compressed, {"type": "2bit", "threshold": 0.5}):
        np.testing.assert_allclose(ours.ravel(), weight, rtol=1e-6)


def what_cannot_be_compressed():
    kv = mx.kv.create(STORE)
    for params in ({"type": "3bit"}, {"type": "2bit", "threshold": -0.5}):
        with pytest.raises(UsageError, match="set_gradient_compression"):
            kv.set_gradient_compression(params)
    kv.set_gradient_compression({"type": "2bit"})
    half = mx.nd.ones((20,), dtype="float16")
    kv.init("w", half)
    with pytest.raises(UsageError, match=r"'w' is float16.*float32"):
        kv.push("w", half)


def test_what_cannot_be_is_refused_on_the_caller(single):
    single.run(what_cannot_be_compressed)
