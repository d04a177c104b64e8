"""Every optimizer of MXNet's registry, trained through p3 and in one process, side by side.

``train_all`` runs in every worker of a cluster.  Gradients are multiples of 1/8, so that sums
over workers are exact and the results must have the same bits.
"""

from __future__ import annotations

import contextlib

import mxnet as mx
import numpy as np

STORE = "dist_sync_p3"
ENVIRONMENT = {"P3_SLICE_ELEMS": "5", "OMP_NUM_THREADS": "1"}
STEPS = 5
RANDOM = "sgld"  # what it draws can be compared by its statistics alone
#: (workers, servers)
TOPOLOGIES = [(1, 1), (1, 3), (2, 1), (2, 3)]
#: index -> (name, shape): as Trainer and Module number and name them
PARAMETERS = {
    0: ("dense0_weight", (4, 3)),
    1: ("dense0_bias", (7,)),
    2: ("norm0_gamma", (1,)),
    3: ("conv0_weight", (2, 3, 2)),
    4: ("norm0_beta", (5,)),
    5: ("dense1_weight", (3, 6)),
}
MATRICES = {0: ("a_weight", (4, 3)), 1: ("b_weight", (7, 1)), 2: ("c_weight", (1, 1))}
#: what shows more of an optimizer than its defaults do
SETTINGS = {
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "ccsgd": {"momentum": 0.9},
    "lars": {"eta": 1.0, "momentum": 0.9},
    "lbsgd": {"momentum": 0.9, "warmup_strategy": "lars", "batch_scale": 2},
    "rmsprop": {"centered": True},
    "signum": {"momentum": 0.9, "wd_lh": 0.01},
    "lamb": {"lower_bound": 0.01, "upper_bound": 10.0},
    "groupadagrad": {"wd": 0.0},
}
DTYPES = ["float32", "float16"]


def names():
    """The optimizers that MXNet itself registers."""
    registry = mx.optimizer.Optimizer.opt_registry
    return sorted(name for name, kind in registry.items() if kind.__module__.startswith("mxnet."))


def make(name, dtype):
    """The optimizer with a schedule, multipliers by name, clipping and weight decay."""
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[1, 3], factor=0.25, base_lr=0.125)
    settings = {"wd": 0.0625, **SETTINGS.get(name, {})}
    optimizer = mx.optimizer.create(
        name,
        learning_rate=0.125,
        lr_scheduler=schedule,
        rescale_grad=0.25,
        clip_gradient=1.0,
        param_idx2name={index: p[0] for index, p in parameters(name).items()},
        multi_precision=dtype == "float16",
        **settings,
    )
    optimizer.set_lr_mult({"dense0_bias": 2.0, "conv0_weight": 0.5})
    if name != "groupadagrad":
        optimizer.set_wd_mult({"dense1_weight": 3.0, 1: 0.5})
    return optimizer


def parameters(name):
    return MATRICES if name == "groupadagrad" else PARAMETERS


def first_weights(name, dtype):
    draw = np.random.RandomState(1)
    return {
        index: mx.nd.array(draw.uniform(-1, 1, shape), dtype=dtype)
        for index, (_, shape) in parameters(name).items()
    }


def gradient(shape, step, rank, dtype):
    draw = np.random.RandomState(100 * step + 10 * rank + len(shape))
    return mx.nd.array(draw.randint(-40, 40, shape) / 8, dtype=dtype)


def through_the_store(name, dtype):
    """The weights after each step, or the text of what went wrong."""
    kv = mx.kv.create(STORE)
    kv.set_optimizer(make(name, dtype))
    weights = first_weights(name, dtype)
    history = []
    try:
        for index, weight in weights.items():
            kv.broadcast(index, weight, out=weight)
        for step in range(STEPS):
            for index, weight in weights.items():
                pushed = gradient(weight.shape, step, kv.rank, dtype)
                kv.pushpull(index, pushed, out=weight, priority=-index)
            history.append([weight.asnumpy() for weight in weights.values()])
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the result
        for weight in weights.values():
            with contextlib.suppress(Exception):
                weight.wait_to_read()
        return f"{type(error).__name__}: {error}"
    return history


def in_one_process(name, dtype, ranks):
    """The same, by MXNet's own updater, which gets all parameters at once, as from a Trainer."""
    updater = mx.optimizer.get_updater(make(name, dtype))
    weights = first_weights(name, dtype)
    history = []
    try:
        for step in range(STEPS):
            summed = [
                sum(gradient(weight.shape, step, rank, dtype) for rank in range(ranks))
                for weight in weights.values()
            ]
            updater(list(weights), summed, list(weights.values()))
            history.append([weight.asnumpy() for weight in weights.values()])
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the result
        return f"{type(error).__name__}: {error}"
    return history


def train_all(ranks):
    """``{(name, dtype): (through the store, in one process)}``."""
    mx.random.seed(11)
    return {
        (name, dtype): (through_the_store(name, dtype), in_one_process(name, dtype, ranks))
        for name in names()
        for dtype in DTYPES
    }


def largest_difference(pair):
    """Between both histories; ``None`` if MXNet itself could not; raises if only p3 could not."""
    ours, theirs = pair
    if isinstance(theirs, str):
        assert isinstance(ours, str), f"MXNet: {theirs}"
        return None
    assert not isinstance(ours, str), ours
    pairs = [(a, b) for step, other in zip(ours, theirs) for a, b in zip(step, other)]
    assert all(np.isfinite(b).all() for _, b in pairs)
    return max(float(np.abs(a.astype("float64") - b.astype("float64")).max()) for a, b in pairs)
