"""Checkpoints that are whole or absent, and files that appear in one piece."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import mxnet as mx
from mxnet import gluon


def write_whole(path: Path, write: Callable[[str], None]) -> None:
    """Let `write` make a file under another name, then give it its own: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(str(draft))
        os.replace(draft, path)
    finally:
        if draft.exists():
            draft.unlink()


def save_replica(net: gluon.Block, path: Path, context: mx.Context) -> None:
    """The parameters as `context` holds them, for `net.load_parameters`.

    `net.save_parameters` averages over contexts, which mixes the running statistics of
    batch normalisation; this does not.
    """
    named = net._collect_params_with_prefix()
    arrays = {
        name: parameter.data(context).as_in_context(mx.cpu()) for name, parameter in named.items()
    }
    write_whole(path, lambda draft: mx.nd.save(draft, arrays))


class Checkpoint:
    """The latest epoch of a run, in files that begin with `prefix`.

    PREFIX.json names the others, PREFIX-EPOCH.params and PREFIX-EPOCH.states, and is
    replaced last: whenever a run dies, PREFIX.json leads to a whole checkpoint.
    """

    def __init__(self, prefix: str):
        self.index = Path(f"{prefix}.json")
        self.told = False

    def save(self, epoch: int, net: gluon.Block, trainer: gluon.Trainer) -> None:
        """Keep the state after `epoch`, then drop the previous one. For one rank only."""
        previous = self.read() if self.index.exists() else {}
        stem = f"{self.index.stem}-{epoch:04d}"
        entry: Dict[str, Any] = {"epoch": epoch, "params": f"{stem}.params"}
        write_whole(self.index.with_name(entry["params"]), net.save_parameters)
        entry["states"] = self.save_states(f"{stem}.states", trainer)
        write_whole(self.index, lambda draft: _write_json(draft, entry))
        for name in _files(previous):
            if name not in _files(entry) and self.index.with_name(name).exists():
                self.index.with_name(name).unlink()

    def save_states(self, name: str, trainer: gluon.Trainer) -> Optional[str]:
        """Save momentum and the like; None, said once, if they are out of reach."""
        try:
            write_whole(self.index.with_name(name), trainer.save_states)
        except (AssertionError, NotImplementedError, mx.MXNetError) as error:
            if not self.told:
                print(
                    f"checkpoints hold no optimizer states ({error}): a resumed run starts "
                    "with none; --update-on-worker keeps them within reach",
                    file=sys.stderr,
                )
            self.told = True
            return None
        return name

    def load(self, net: gluon.Block, trainer: gluon.Trainer, contexts: List[mx.Context]) -> int:
        """Restore the latest checkpoint and return the epoch to go on with.

        Raises FileNotFoundError if there is none.
        """
        entry = self.read()
        net.load_parameters(str(self.index.with_name(entry["params"])), ctx=contexts)
        if entry["states"]:
            trainer.load_states(str(self.index.with_name(entry["states"])))
        return entry["epoch"] + 1

    def read(self) -> Dict[str, Any]:
        """What PREFIX.json says."""
        if not self.index.exists():
            raise FileNotFoundError(f"no checkpoint to resume: {self.index} is missing")
        return json.loads(self.index.read_text())


def _files(entry: Dict[str, Any]) -> List[str]:
    return [entry[kind] for kind in ("params", "states") if entry.get(kind)]


def _write_json(path: str, value: Any) -> None:
    Path(path).write_text(json.dumps(value) + "\n")
