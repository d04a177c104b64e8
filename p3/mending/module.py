"""Module with p3's stores; what is mended and why: ``p3/mending``."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Sequence

from p3.errors import UsageError
from p3.mending import names
from p3.mending.stores import is_p3, own


def init_optimizer(
    original: Callable[..., Any],
    module: Any,
    kvstore: Any = "local",
    optimizer: Any = "sgd",
    optimizer_params: Any = (("learning_rate", 0.01),),
    force_init: bool = False,
) -> None:
    """``Module.init_optimizer``: a store of its own."""
    if force_init or not module.optimizer_initialized:
        kvstore = own(kvstore)
    original(module, kvstore, optimizer, optimizer_params, force_init)


def initialize_kvstore(
    original: Callable[..., Any],
    kvstore: Any,
    param_arrays: Sequence[List[Any]],
    arg_params: Dict[str, Any],
    param_names: Sequence[str],
    update_on_kvstore: bool,
) -> None:
    """``mxnet.model._initialize_kvstore``: rank 0's weights everywhere, wherever updates happen."""
    if not is_p3(kvstore):
        original(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
        return
    if "_async" in kvstore.type and not update_on_kvstore:
        raise UsageError(
            f"Module with kvstore {kvstore.type!r} updates on the servers only, but"
            " MXNET_UPDATE_ON_KVSTORE=0 asks for updates on the workers; unset it"
        )
    _compare_names(kvstore, list(param_names))
    for name, on_devices in zip(param_names, param_arrays):
        value = arg_params[name]
        if value.stype == "default":
            kvstore.broadcast(name, value, out=[*on_devices, value])
        else:
            kvstore.init(name, value)


def init_params(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
    """``Module.init_params``: the servers take rank 0's values."""
    call = _bound(original, module, *args, **kwargs)
    has_effect = call["force_init"] or not module.params_initialized
    original(module, *args, **kwargs)
    if has_effect and call["arg_params"] is not module._arg_params:
        _replace(module, module._arg_params)


def set_params(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
    """``Module.set_params``, which calls ``init_params`` unless values may be missing."""
    call = _bound(original, module, *args, **kwargs)
    has_effect = call["force_init"] or not module.params_initialized
    given = call["arg_params"]
    original(module, *args, **kwargs)
    if call["allow_missing"] and has_effect and given and given is not module._arg_params:
        _replace(module, given)


def _bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Dict[str, Any]:
    """The arguments of the call ``function(*args, **kwargs)`` by name."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _replace(module: Any, given: Dict[str, Any]) -> None:
    """Have the servers take the weights in ``given``, which the module has by now.

    What ``get_params`` has returned holds nothing new and must not come here: ``fit`` sets it
    after each epoch, and other ranks may have trained an asynchronous store's weights since.
    """
    if not (module.optimizer_initialized and module._update_on_kvstore and is_p3(module._kvstore)):
        return
    group = module._exec_group
    for name, on_devices in zip(group.param_names, group.param_arrays):
        if name in given:
            dense = on_devices[0].stype == "default"
            value = on_devices[0] if dense else given[name].tostype("row_sparse")
            module._kvstore.replace(name, value)


def _compare_names(kvstore: Any, own_names: List[str]) -> None:
    """Raise ``UsageError`` on every rank if two ranks have parameters of different names."""
    from p3.mending.agreement import Agreement

    agreement = Agreement(kvstore)
    first = agreement.rank_0s(own_names)
    agreement.check("Module", lambda: names.refuse_others(own_names, first))
