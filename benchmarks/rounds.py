"""A worker that does nothing but rounds: pushpull every key, wait for all, again.

    p3 launch -n 1 -s 1 benchmarks/rounds.py --kvstore dist_sync_p3 --keys 16x1000000
    p3 launch --native -n 1 -s 1 benchmarks/rounds.py --kvstore dist_sync --keys 16x1000000

``--keys``: COUNTxELEMENTS, or a network of MXNet's model zoo for its parameters' shapes.
Rank 0 prints one JSON line: seconds of each round after the warm-up, bytes of the keys.
SGD with momentum runs on the servers.
"""

from __future__ import annotations

import argparse
import json
import time

import mxnet as mx


def shapes_of(keys: str) -> list:
    """The shapes of the keys that ``--keys`` asks for."""
    count, x, elements = keys.partition("x")
    if x and count.isdigit() and elements.isdigit():
        return [(int(elements),)] * int(count)
    net = mx.gluon.model_zoo.vision.get_model(keys)
    net.initialize()
    side = 299 if "inception" in keys else 224
    net(mx.nd.zeros((1, 3, side, side)))
    return [p.shape for p in net.collect_params().values() if p.grad_req != "null"]


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvstore", default="dist_sync_p3")
    parser.add_argument("--keys", default="16x1000000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    kv = mx.kv.create(args.kvstore)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.01, momentum=0.9))
    shapes = shapes_of(args.keys)
    weights = [mx.nd.zeros(shape) for shape in shapes]
    gradients = [mx.nd.ones(shape) for shape in shapes]
    for key, weight in enumerate(weights):
        kv.broadcast(key, weight, out=weight)
    mx.nd.waitall()
    seconds = []
    for _ in range(args.warm_up + args.rounds):
        start = time.perf_counter()
        for key, (gradient, weight) in enumerate(zip(gradients, weights)):
            kv.pushpull(key, gradient, out=weight, priority=-key)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - start)
    if kv.rank == 0:
        total = 4 * sum(weight.size for weight in weights)
        print(json.dumps({"seconds": seconds[args.warm_up :], "bytes": total}), flush=True)


if __name__ == "__main__":
    main()
