"""What a run measures and shows: loss and accuracy, its rate, a progress bar."""

from __future__ import annotations

import sys
import time
from typing import Iterable, NamedTuple, Optional, TextIO, Tuple

import mxnet as mx

#: Of each context: the sum of its losses, the number of hits (both not yet read), its images.
Outcome = Iterable[Tuple[mx.nd.NDArray, mx.nd.NDArray, int]]


def outcome_of(
    losses: mx.nd.NDArray, outputs: mx.nd.NDArray, labels: mx.nd.NDArray
) -> Tuple[mx.nd.NDArray, mx.nd.NDArray, int]:
    """One context's part of an Outcome; does not wait for it."""
    return losses.sum(), (outputs.argmax(axis=1) == labels).sum(), len(labels)


class Figures(NamedTuple):
    """Mean loss and accuracy over some images."""

    loss: float
    accuracy: float


class Sums:
    """Losses and hits added up over the images of an epoch."""

    def __init__(self) -> None:
        self.loss = self.hits = 0.0
        self.count = 0

    def add(self, outcome: Outcome) -> None:
        """Wait for the outcome of one step, and add it."""
        for loss, hits, count in outcome:
            self.loss += float(loss.asscalar())
            self.hits += float(hits.asscalar())
            self.count += count

    def figures(self) -> Figures:
        """The means."""
        return Figures(self.loss / self.count, self.hits / self.count)


class Progress:
    """One line about an epoch: redrawn in place on a terminal, else a new line now and then.

    `every_s`: seconds between two plain lines. `shown=False` makes it silent.
    """

    def __init__(
        self,
        title: str,
        total: int,
        shown: bool = True,
        every_s: float = 2.0,
        stream: Optional[TextIO] = None,
    ):
        self.title, self.total, self.shown = title, total, shown
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.every_s = 0.1 if self.live else every_s
        self.due = 0.0

    def update(self, done: int, **figures: float) -> None:
        """Show that `done` batches are done, with these figures; the last is always shown."""
        now = time.monotonic()
        if not self.shown or (now < self.due and done < self.total):
            return
        self.due = now + self.every_s
        bar = "#" * (20 * done // self.total)
        text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        line = f"{self.title} [{bar:.<20}] {done}/{self.total}  {text}"
        if self.live:
            self.stream.write(f"\r\033[K{line}" + ("\n" if done == self.total else ""))
        else:
            self.stream.write(line + "\n")
        self.stream.flush()


class Rate:
    """Images a second between ticks that come once a batch.

    The first `skip` ticks of the run are start-up (memory is allocated, weights are
    spread), and time between epochs (evaluation, checkpoints) is not counted.
    """

    def __init__(self, skip: int = 4):
        self.skip = skip
        self.images = 0
        self.seconds = 0.0
        self.last: Optional[float] = None

    def pause(self) -> None:
        """The time until the next tick does not count."""
        self.last = None

    def tick(self, images: int) -> None:
        """A batch of `images` is done."""
        now = time.perf_counter()
        if self.skip > 0:
            self.skip -= 1
            return
        if self.last is not None:
            self.images += images
            self.seconds += now - self.last
        self.last = now

    @property
    def per_second(self) -> float:
        """Images a second, 0.0 before anything was measured."""
        return self.images / self.seconds if self.seconds else 0.0
