"""What MXNet's own Python code gets wrong for p3's stores, put right from outside.

``install`` puts a wrapper before each of these functions of MXNet.  A wrapper acts only if the
store at hand is p3's; for any other store, and for none, MXNet runs as it is.

    what MXNet does by itself                                        what it does with p3's store
    Trainer, Module: two of them given one store object share        each gets a store of its own
      its keys and its optimizer
    Trainer numbers parameters by the text order of their names:     as on rank 0
      dense10 before dense9, so not alike on all ranks
    Trainer: no key for the first mention of a parameter listed      it is listed once
      twice
    Trainer refuses another batch size than the first step's         the servers follow it
    ignore_stale_grad=True: this rank's old gradients are used       what no rank has used stays,
      again, or its weights are left out of the update                 the rest moves on all ranks
    Parameter.set_data, load_parameters: "Cannot reset distributed   the servers take the value
      KVStore"; initialize(force_reinit=True): the next step undoes
    Module.set_params, init_params: the next step undoes them        the servers take the values
    Module with updates on the workers: every rank trains weights    all begin with rank 0's
      of its own
    Module with updates on the workers and an asynchronous store     ``UsageError``
    Module: parameters of other names on other ranks                 ``UsageError``

``trainer.py`` and ``module.py`` are Gluon's and Module's part, ``stale.py`` is about gradients
that are not of this step, ``agreement.py`` asks the other ranks, ``names.py`` compares names.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable


def install() -> None:
    """Put the wrappers in place; MXNet must have been imported.  Idempotent."""
    import mxnet

    from p3.mending import module, stale, trainer

    wrap(mxnet.gluon.Trainer, "_init_kvstore", trainer.init_kvstore)
    wrap(mxnet.gluon.Trainer, "_check_and_rescale_grad", trainer.rescale_grad)
    wrap(mxnet.gluon.Trainer, "step", stale.step)
    wrap(mxnet.gluon.Trainer, "allreduce_grads", stale.allreduce_grads)
    wrap(mxnet.gluon.Trainer, "update", stale.update)
    wrap(mxnet.gluon.Parameter, "set_data", trainer.set_data)
    wrap(mxnet.gluon.Parameter, "initialize", trainer.initialize)
    wrap(mxnet.module.Module, "init_optimizer", module.init_optimizer)
    wrap(mxnet.module.Module, "init_params", module.init_params)
    wrap(mxnet.module.Module, "set_params", module.set_params)
    wrap(mxnet.model, "_initialize_kvstore", module.initialize_kvstore)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper(original, *args)`` called for ``owner.name``, a module's or a class's.

    Every other module of MXNet that has imported the function gets the wrapped one, too.
    """
    original = getattr(owner, name)
    if getattr(original, "wrapped_by_p3", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.wrapped_by_p3 = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    for path, holder in list(sys.modules.items()):
        if path.split(".")[0] == "mxnet" and getattr(holder, "__dict__", {}).get(name) is original:
            setattr(holder, name, wrapped)
