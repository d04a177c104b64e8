"""docs/optimizers.md has every optimizer of MXNet's registry, and how it is applied."""

from __future__ import annotations

import pathlib

import mxnet as mx
import pytest
from cases import matrix

from p3 import optimizers

TEXT = (pathlib.Path(__file__).parent.parent / "docs/optimizers.md").read_text()


def rows() -> dict[str, list[str]]:
    table = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            table[cells[0].strip("`")] = cells[1:]
    return table


def test_the_table_has_every_optimizer_and_no_other() -> None:
    assert list(rows()) == matrix.names()


@pytest.mark.parametrize("name", matrix.names())
def test_the_table_tells_how_it_is_applied_and_what_the_matrix_asserts(name: str) -> None:
    kind, applied, *differences = rows()[name]
    optimizer = mx.optimizer.create(name)
    assert kind == type(optimizer).__name__
    assert applied == ("whole keys" if optimizers.needs_whole_keys(optimizer) else "slices")
    assert differences == ["random" if name == matrix.RANDOM else "0"] * 4
