"""A training loop written by hand with Gluon, on handwritten digits.

    python examples/custom_trainer.py                                 # one process
    p3 launch -n 2 -s 2 examples/custom_trainer.py --kvstore dist_sync_p3

Three lines make it distributed: the store is created by name, this worker reads its own
shard of the data, and `trainer.step` is told the images of all workers together.
"""

import argparse

# isort: off
import p3  # noqa: F401  registers p3's stores as MXNet is imported, so it comes first
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from data import digits, shard_batches

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--kvstore", default="device")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
mx.random.seed(args.seed)
data = digits()

store = mx.kv.create(args.kvstore)  # 1: the store
net = nn.HybridSequential()
net.add(
    nn.Conv2D(16, 3, padding=1, activation="relu"),
    nn.MaxPool2D(),
    nn.Conv2D(32, 3, padding=1, activation="relu"),
    nn.MaxPool2D(),
    nn.Dense(64, activation="relu"),
    nn.Dense(10),
)
net.initialize(mx.init.Xavier())
net.hybridize()
trainer = gluon.Trainer(
    net.collect_params(), "sgd", {"learning_rate": args.lr, "momentum": 0.9}, kvstore=store
)
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    total = 0.0
    shard = shard_batches(
        len(data.train), store.rank, store.num_workers, args.batch_size, args.seed, epoch
    )  # 2: the shard
    for index in shard:
        pixels, labels = map(mx.nd.array, data.train.batch(index, size=16))
        with autograd.record():
            loss = loss_function(net(pixels), labels)
        loss.backward()
        trainer.step(args.batch_size * store.num_workers)  # 3: the global batch
        total += loss.mean().asscalar()
    print(f"rank {store.rank}, epoch {epoch + 1}: loss {total / len(shard):.4f}", flush=True)

pixels, labels = map(mx.nd.array, data.test.batch(range(len(data.test)), size=16))
accuracy = (net(pixels).argmax(axis=1) == labels).mean().asscalar()
print(f"rank {store.rank}: test accuracy {accuracy:.4f}")
