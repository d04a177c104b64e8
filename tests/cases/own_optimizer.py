"""Optimizers of one's own, in a module that servers can import."""

from __future__ import annotations

import mxnet as mx


class Counting(mx.optimizer.Optimizer):
    """Moves by the norm of the whole gradient, and by how many updates it has made in all."""

    def __init__(self, pace=1.0, **kwargs):
        super().__init__(**kwargs)
        self.pace, self.made = pace, 0

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        self.made += 1
        step = self._get_lr(index) * self.pace * self.made
        weight[:] -= step * self.rescale_grad * grad / grad.norm()


class Stumbling(mx.optimizer.SGD):
    """Raises at the third update of "b"."""

    def update_multi_precision(self, index, weight, grad, state):
        super().update_multi_precision(index, weight, grad, state)
        if tuple(index) == ("b",) and self._index_update_count["b"] == 3:
            raise ArithmeticError("it stumbled")


class Ticking(mx.lr_scheduler.LRScheduler):
    """A schedule with a function in it."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def __call__(self, num_update):
        return self.rate(num_update)
