"""Train an image classifier with Gluon, on one machine or many.

    python examples/image_classification.py                                  # one process
    p3 launch -n 2 -s 2 examples/image_classification.py --kvstore dist_sync_p3
    p3 launch --native -n 2 -s 2 examples/image_classification.py --kvstore dist_sync

The store's name is all that differs. Every worker reads its own part of each global batch
of --batch-size times workers images, so the result is that of one process with the global
batch (batch normalisation apart, which sees the worker's part).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple

# isort: off
import p3  # noqa: F401  registers p3's stores as MXNet is imported, so it comes first
import mxnet as mx
from mxnet import autograd, gluon

import models
from checkpoint import Checkpoint, save_replica
from data import NAMES, Batch, Data, DataError, Split, batches_in_order, load, shard_batches
from progress import Figures, Outcome, Progress, Rate, Sums, outcome_of


def parse_args(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The command line; ends the program with a usage message where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data_flags(parser.add_argument_group("network and data").add_argument)
    add_training_flags(parser.add_argument_group("training").add_argument)
    add_output_flags(parser.add_argument_group("output").add_argument)
    args = parser.parse_args(argv)
    devices = args.gpus or args.contexts
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint PREFIX")
    if args.batch_size % devices:
        parser.error(
            f"--batch-size {args.batch_size} cannot be shared equally among {devices} contexts"
        )
    if args.momentum is None and args.optimizer.lower() in ("sgd", "nag"):
        args.momentum = 0.9
    args.image_size = args.image_size or models.default_image_size(args.network)
    return args


def add_data_flags(add: Callable) -> None:
    """What is trained, on what."""
    add(
        "--network",
        default="cifar_resnet20",
        help=f"{', '.join(models.OWN)}, or a name of "
        "mxnet.gluon.model_zoo.vision such as resnet18_v1, vgg11, inceptionv3",
    )
    add("--dataset", default="digits", choices=NAMES)
    add("--data-dir", default="", help="folder of mnist or cifar10, FILE.rec for recordio")
    add("--image-size", type=positive, help="pixels (default: a small one for the network)")
    add("--classes", type=positive, help="outputs of the network (default: the data's)")


def add_training_flags(add: Callable) -> None:
    """How it is trained."""
    add("--kvstore", default="device", help="local, device, dist_sync_p3, dist_sync, ...")
    add("--batch-size", type=positive, default=32, help="images a worker reads in one step")
    add("--epochs", type=positive, default=5)
    add("--max-batches", type=positive, help="end the run after so many steps")
    add("--optimizer", default="sgd")
    add("--lr", type=float, default=0.01)
    add("--momentum", type=float, help="default: 0.9 for sgd and nag")
    add("--wd", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--contexts", type=positive, default=1, help="share a step among so many cpu(i)")
    add("--gpus", type=positive, help="share a step among so many GPUs instead")
    add("--update-on-worker", action="store_true", help="the store only sums gradients")


def add_output_flags(add: Callable) -> None:
    """What it leaves."""
    add("--checkpoint", metavar="PREFIX", help="keep the latest epoch's state in PREFIX*")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add(
        "--save-params",
        metavar="FILE",
        help="write the weights at the end; {replica} in FILE "
        "is replaced by worker x contexts + context, and each writes its own",
    )
    add("--report", metavar="FILE", help="append one line of JSON with the results")


def positive(text: str) -> int:
    """An argparse type: an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def build_network(
    args: argparse.Namespace, classes: int, contexts: List[mx.Context]
) -> gluon.HybridBlock:
    """The network with all its weights initialised: the same on every worker, given --seed."""
    net = models.build(args.network, classes)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    probe = mx.nd.zeros((1, 3, args.image_size, args.image_size), ctx=contexts[0])
    try:
        net(probe).wait_to_read()  # finds the shapes of all weights
    except (ValueError, mx.MXNetError) as error:
        reason = str(error).splitlines()[-1]
        raise ValueError(
            f"{args.network} does not take images of {args.image_size}x{args.image_size} pixels: "
            f"try --image-size 224 ({reason})"
        ) from None
    net.hybridize()
    return net


def build_trainer(
    args: argparse.Namespace, net: gluon.Block, store: mx.kvstore.KVStoreBase
) -> gluon.Trainer:
    """A Trainer over the store."""
    settings = {"learning_rate": args.lr, "wd": args.wd}
    if args.momentum is not None:
        settings["momentum"] = args.momentum
    return gluon.Trainer(
        net.collect_params(),
        args.optimizer,
        settings,
        kvstore=store,
        update_on_kvstore=False if args.update_on_worker else None,
    )


class Training:
    """One worker's run: what it trains, with what, on which part of the data."""

    def __init__(self, args: argparse.Namespace, data: Data):
        mx.random.seed(args.seed)
        device = mx.gpu if args.gpus else mx.cpu
        self.args, self.data = args, data
        self.classes = args.classes or data.classes
        self.contexts = [device(i) for i in range(args.gpus or args.contexts)]
        self.net = build_network(args, self.classes, self.contexts)
        self.store = mx.kv.create(args.kvstore)
        self.trainer = build_trainer(args, self.net, self.store)
        self.global_batch = args.batch_size * self.store.num_workers
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.rate = Rate()
        self.steps = 0
        self.checkpoint = Checkpoint(args.checkpoint) if args.checkpoint else None

    def run(self) -> Tuple[Figures, Figures]:
        """Train; returns this worker's last training figures and those on the test images."""
        first = 0
        if self.args.resume:
            first = self.checkpoint.load(self.net, self.trainer, self.contexts)
            self.trainer.set_learning_rate(self.args.lr)
        trained = tested = Figures(float("nan"), float("nan"))
        for epoch in range(first, self.args.epochs):
            trained = self.epoch(epoch)
            if self.store.rank == 0:  # the others go on, and wait for it in their next step
                tested = self.evaluate(self.data.test)
                print(
                    f"epoch {epoch + 1}: test accuracy {tested.accuracy:.4f}, "
                    f"test loss {tested.loss:.4f}",
                    flush=True,
                )
                if self.checkpoint:
                    self.checkpoint.save(epoch, self.net, self.trainer)
            if self.steps == self.args.max_batches:
                break
        mx.nd.waitall()  # MXNet's own stores lose what is under way when a script ends
        return trained, tested

    def epoch(self, epoch: int) -> Figures:
        """Train on this worker's shard of one epoch."""
        args, workers = self.args, self.store.num_workers
        mx.random.seed(args.seed + epoch)
        shard = shard_batches(
            len(self.data.train), self.store.rank, workers, args.batch_size, args.seed, epoch
        )
        if args.max_batches:
            shard = shard[: args.max_batches - self.steps]
        progress = Progress(
            f"epoch {epoch + 1}/{args.epochs}", len(shard), shown=self.store.rank == 0
        )
        sums, pending = Sums(), None
        self.rate.pause()
        for index in shard:
            outcome = self.step(self.data.train.batch(index, args.image_size))
            if pending:  # read a step late, so that Python stays ahead of the computation
                self.show(progress, sums, pending)
                self.rate.tick(self.global_batch)
            pending = outcome
        self.show(progress, sums, pending)
        return sums.figures()

    def step(self, batch: Batch) -> Outcome:
        """Start one step, without waiting; returns what `Sums.add` takes."""
        if batch[1].max() >= self.classes:
            raise DataError(f"label {batch[1].max():.0f} is too large: --classes {self.classes}")
        pixels, labels = (gluon.utils.split_and_load(part, self.contexts) for part in batch)
        with autograd.record():
            outputs = [self.net(part) for part in pixels]
            losses = [self.loss(*pair) for pair in zip(outputs, labels)]
        outcome = [outcome_of(*part) for part in zip(losses, outputs, labels)]
        autograd.backward(losses)
        self.trainer.step(self.global_batch)
        self.steps += 1
        return outcome

    def show(self, progress: Progress, sums: Sums, outcome: Outcome) -> None:
        """Wait for a step's figures, and show them."""
        sums.add(outcome)
        speed = {"images/s": self.rate.per_second} if self.rate.seconds else {}
        progress.update(sums.count // self.args.batch_size, **sums.figures()._asdict(), **speed)

    def evaluate(self, split: Split) -> Figures:
        """Figures on a split, by the first context's replica."""
        sums = Sums()
        batches = batches_in_order(split, self.args.batch_size)[: self.args.max_batches]
        for index in batches:
            pixels, labels = (
                mx.nd.array(part, ctx=self.contexts[0])
                for part in split.batch(index, self.args.image_size)
            )
            output = self.net(pixels)
            sums.add([outcome_of(self.loss(output, labels), output, labels)])
        return sums.figures()

    def report(self, trained: Figures, tested: Figures, seconds: float) -> dict:
        """The results, for people and programs."""
        return {
            "store": self.store.type,
            "network": self.args.network,
            "workers": self.store.num_workers,
            "contexts": len(self.contexts),
            "images_per_s": round(self.rate.per_second, 2),
            "steps": self.steps,
            "seconds": round(seconds, 2),
            "loss": trained.loss,
            "accuracy": trained.accuracy,
            "test_loss": tested.loss,
            "test_accuracy": tested.accuracy,
        }

    def save_params(self, template: str) -> None:
        """Write this worker's replicas, or rank 0's first one if `template` has no {replica}."""
        first = self.store.rank * len(self.contexts)
        for replica, context in enumerate(self.contexts, first):
            if "{replica}" in template or replica == 0:
                path = Path(template.replace("{replica}", str(replica)))
                save_replica(self.net, path, context)


def main(argv: Optional[List[str]] = None) -> None:
    """Train as the command line says."""
    args = parse_args(argv)
    started = time.monotonic()
    try:
        training = Training(args, load(args.dataset, args.data_dir, args.seed))
        trained, tested = training.run()
    except (DataError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"image_classification.py: {error}") from error
    if args.save_params:
        training.save_params(args.save_params)
    if training.store.rank == 0:
        report = training.report(trained, tested, time.monotonic() - started)
        print(
            f"{report['images_per_s'] or 'too few steps to count'} images/s "
            f"on {report['workers']} worker(s)"
        )
        if args.report:
            with open(args.report, "a") as file:
                file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
