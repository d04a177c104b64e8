"""Print the table of docs/optimizers.md: every optimizer through p3 beside local training.

PYTHONPATH=.:tests python tests/optimizer_table.py
"""

from __future__ import annotations

import mxnet as mx
from cases import matrix

from p3 import optimizers
from p3.testing import LocalCluster


def differences(topologies):
    """``{(name, dtype): the largest difference from local training over all of them}``."""
    found = {}
    for workers, servers in topologies:
        with LocalCluster(workers, servers, matrix.ENVIRONMENT, deadline_s=240) as cluster:
            for outcome in cluster.run(matrix.train_all, workers):
                for cell, pair in outcome.items():
                    found.setdefault(cell, []).append(matrix.largest_difference(pair))
    return {cell: None if None in values else max(values) for cell, values in found.items()}


def cell(name, value):
    if name == matrix.RANDOM:
        return "random"
    return "MXNet cannot" if value is None else f"{value:g}"


def rows(one, two):
    for name in matrix.names():
        kind = mx.optimizer.Optimizer.opt_registry[name]
        whole = optimizers.needs_whole_keys(mx.optimizer.create(name))
        values = [found[name, dtype] for dtype in matrix.DTYPES for found in (one, two)]
        cells = [cell(name, value) for value in values]
        yield [f"`{name}`", kind.__name__, "whole keys" if whole else "slices", *cells]


def main():
    one, two = (
        differences([topology for topology in matrix.TOPOLOGIES if topology[0] == workers])
        for workers in (1, 2)
    )
    print("| name | class | applied to | float32, 1 worker | 2 workers | float16, 1 | 2 |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(one, two):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
