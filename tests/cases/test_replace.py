"""New values for keys that are there: between two rounds, rank 0's, on every rank."""

from __future__ import annotations

import mxnet as mx

SIZE = 20


def replace_between_two_rounds():
    kv = mx.kv.create("dist_sync_p3")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1, momentum=0.5))
    weight = mx.nd.zeros((SIZE,))
    kv.broadcast("w", weight, out=weight)
    seen = []
    for step in range(4):
        if step == 2:
            kv.replace("w", mx.nd.full((SIZE,), 100.0 * (1 + kv.rank)))
        kv.pushpull("w", mx.nd.ones((SIZE,)), out=weight)
        seen.append(weight.asnumpy())
    assert all((values == values[0]).all() for values in seen)
    return [float(values[0]) for values in seen]


def test_a_replaced_value_is_what_the_next_round_starts_from(pair):
    for seen in pair.run(replace_between_two_rounds):
        assert seen == [-2.0, -5.0, 100 - 3.5, 100 - 3.5 - 3.75]  # momentum goes on
