"""Gluon's Trainer and Parameter with p3's stores; what is mended and why: ``p3/mending``."""

from __future__ import annotations

from typing import Any, Callable, List

from p3.errors import UsageError
from p3.mending import names
from p3.mending.stores import is_p3, own


def init_kvstore(original: Callable[..., Any], trainer: Any) -> None:
    """``Trainer._init_kvstore``: a store of its own, whose keys mean the same on all ranks."""
    trainer._kvstore_params["kvstore"] = own(trainer._kvstore_params["kvstore"])
    original(trainer)
    if is_p3(trainer._kvstore):
        from p3.mending.agreement import Agreement

        trainer._p3_agreement = Agreement(trainer._kvstore)
        _number_parameters(trainer)


def rescale_grad(original: Callable[..., Any], trainer: Any, scale: float) -> None:
    """``Trainer._check_and_rescale_grad``: p3's servers hear of a new scale with the next push."""
    if is_p3(trainer._kvstore):
        trainer._optimizer.rescale_grad = scale
    else:
        original(trainer, scale)


def set_data(original: Callable[..., Any], parameter: Any, data: Any) -> None:
    """``Parameter.set_data``: the servers take rank 0's value; the others' lasts for a step."""
    trainer = parameter._trainer
    if not _is_on_servers(parameter):
        original(parameter, data)
        return
    parameter._trainer = None  # it would have the Trainer forget its store
    try:
        original(parameter, data)
    finally:
        parameter._trainer = trainer
    _replace(parameter)


def initialize(original: Callable[..., Any], parameter: Any, *args: Any, **kwargs: Any) -> None:
    """``Parameter.initialize``, which with ``force_reinit`` is a ``set_data``."""
    before = parameter._data
    original(parameter, *args, **kwargs)
    if parameter._data is not before and _is_on_servers(parameter):
        _replace(parameter)


def _number_parameters(trainer: Any) -> None:
    """Number the parameters as rank 0 does, each once."""
    params = list(dict.fromkeys(trainer._params))
    agreement, own_names = trainer._p3_agreement, [param.name for param in params]
    first = agreement.rank_0s(own_names)

    def positions() -> List[int]:
        for name in own_names:
            if own_names.count(name) > 1:
                raise UsageError(f"two different parameters are both called {name!r}")
        return names.align(own_names, first)

    params = [params[place] for place in agreement.check("gluon.Trainer", positions)]
    if params != trainer._params:
        trainer._params = params
        trainer._param2idx = {param.name: index for index, param in enumerate(params)}
        trainer._params_to_init = list(params)
        trainer._optimizer.param_dict = dict(enumerate(params))


def _is_on_servers(parameter: Any) -> bool:
    """Whether p3's servers hold the weight, so that a value set here alone would not last."""
    trainer = parameter._trainer
    return (
        trainer is not None
        and is_p3(trainer._kvstore)
        and bool(trainer._update_on_kvstore)
        and parameter._data is not None
        and parameter not in trainer._params_to_init
    )


def _replace(parameter: Any) -> None:
    trainer = parameter._trainer
    trainer._kvstore.replace(trainer._param2idx[parameter.name], parameter._data[0])
