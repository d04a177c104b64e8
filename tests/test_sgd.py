"""SGD in NumPy gives MXNet's bits."""

from __future__ import annotations

import random
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from p3.server.sgd import Sgd

#: magnitudes of everyday and of hostile values
SCALES = [1.0, 1e-3, 1e3, 1e-20, 1e-38, 1e30]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.123456789])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("wd", [0.0, 1e-4, 0.3])
def test_same_bits_as_mxnet(momentum: float, clip: Any, wd: float) -> None:
    draw = np.random.RandomState(int(momentum * 100) + int(wd * 1e5))
    rates = random.Random(3)
    for scale in SCALES:
        rate, rescale = rates.uniform(1e-4, 1), 1 / rates.randint(1, 300)
        optimizer = mx.optimizer.SGD(
            momentum=momentum, wd=wd, clip_gradient=clip, learning_rate=rate, rescale_grad=rescale
        )
        updater, sgd = mx.optimizer.get_updater(optimizer), Sgd()
        weight = (draw.randn(1237) * scale).astype(np.float32)
        theirs, state = mx.nd.array(weight), np.zeros_like(weight) if momentum else None
        for _ in range(4):
            gradient = (draw.randn(1237) * rates.choice(SCALES)).astype(np.float32)
            updater(0, mx.nd.array(gradient), theirs)
            sgd.update(weight, gradient.copy(), state, rate, wd, optimizer)
            assert weight.tobytes() == theirs.asnumpy().tobytes()
