"""Train with the symbolic Module API: a small convolutional network on handwritten digits.

    python examples/module_fit.py                                     # one process
    p3 launch -n 2 -s 2 examples/module_fit.py --kvstore dist_sync_p3

`Module.fit` does all the work. It divides gradients by the number of workers itself, so
--batch-size is a worker's.
"""

from __future__ import annotations

import argparse
import logging

# isort: off
import p3  # noqa: F401  registers p3's stores as MXNet is imported, so it comes first
import mxnet as mx

from data import DataError, Split, digits, shard_batches

SIZE = 16  # pixels that the 8x8 digits are scaled up to


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvstore", default="device")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def network() -> mx.sym.Symbol:
    """Two convolutions and two dense layers."""
    net = mx.sym.var("data")
    for number, channels in enumerate((16, 32)):
        net = mx.sym.Convolution(
            net, kernel=(3, 3), pad=(1, 1), num_filter=channels, name=f"conv{number}"
        )
        net = mx.sym.Activation(net, act_type="relu")
        net = mx.sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max")
    net = mx.sym.FullyConnected(mx.sym.flatten(net), num_hidden=64, name="dense0")
    net = mx.sym.Activation(net, act_type="relu")
    net = mx.sym.FullyConnected(net, num_hidden=10, name="dense1")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def shard_iter(
    split: Split, args: argparse.Namespace, rank: int, workers: int
) -> mx.io.NDArrayIter:
    """This worker's part of a split, in the same order each epoch."""
    index = shard_batches(len(split), rank, workers, args.batch_size, args.seed, epoch=0)
    return mx.io.NDArrayIter(*split.batch(index.ravel(), SIZE), batch_size=args.batch_size)


def main() -> None:
    """Train on this worker's shard, then print the accuracy on all test images."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_args()
    mx.random.seed(args.seed)
    data = digits()
    store = mx.kv.create(args.kvstore)
    module = mx.mod.Module(network(), context=mx.cpu())
    module.fit(
        shard_iter(data.train, args, store.rank, store.num_workers),
        kvstore=store,
        optimizer="sgd",
        optimizer_params={"learning_rate": args.lr, "momentum": 0.9},
        initializer=mx.init.Xavier(),
        eval_metric="acc",
        num_epoch=args.epochs,
    )
    test = mx.io.NDArrayIter(
        *data.test.batch(range(len(data.test)), SIZE), batch_size=args.batch_size
    )
    print(f"rank {store.rank}: validation accuracy {module.score(test, 'acc')[0][1]:.4f}")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(f"module_fit.py: {error}") from error
