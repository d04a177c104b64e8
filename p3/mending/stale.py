"""``ignore_stale_grad=True``: parameters that a rank's backward has not reached in this step.

In one process with the whole batch such a parameter is updated if any example has used it, by
those examples' gradient, and left alone otherwise.  MXNet decides on each device by itself:
a device pushes its old gradient once more, or keeps its weights where the others change theirs.
So with p3's stores the ranks first tell each other which parameters they have used; then

- what no rank has used is neither pushed nor updated;
- for what some rank has used, the others push zeros, and all take the result.

Telling each other takes a round trip, for which the training thread waits; only calls with
``ignore_stale_grad=True`` do so.  Asynchronous ranks do not ask: each pushes what it has used.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, List

from p3.mending.stores import is_p3

_ignoring: weakref.WeakSet[Any] = weakref.WeakSet()  # Trainers that update with stale gradients


def step(
    original: Callable[..., Any], trainer: Any, batch_size: int, ignore_stale_grad: bool = False
) -> None:
    """``Trainer.step``."""
    if not ignore_stale_grad or not _ready(trainer, batch_size):
        original(trainer, batch_size, ignore_stale_grad)
        return
    _spread_stale(trainer)
    with _used_alone(trainer) as (used, unused):
        original(trainer, batch_size, ignore_stale_grad)
    if trainer._update_on_kvstore:
        for param in used:
            _mark(param, fresh=False)  # MXNet does it where it updates by itself
    if "_async" in trainer._kvstore.type:
        _pull(trainer, unused)


def allreduce_grads(original: Callable[..., Any], trainer: Any) -> None:
    """``Trainer.allreduce_grads``, of a script that ignores stale gradients later, in update."""
    if trainer in _ignoring:
        _spread_stale(trainer)
    original(trainer)


def update(
    original: Callable[..., Any], trainer: Any, batch_size: int, ignore_stale_grad: bool = False
) -> None:
    """``Trainer.update``."""
    if not ignore_stale_grad or not _ready(trainer, batch_size) or trainer._update_on_kvstore:
        original(trainer, batch_size, ignore_stale_grad)
        return
    _ignoring.add(trainer)
    with _used_alone(trainer):
        original(trainer, batch_size, ignore_stale_grad)


def _ready(trainer: Any, batch_size: int) -> bool:
    """Whether the Trainer's store is p3's; does first what the call would do first."""
    if not trainer._kv_initialized:
        trainer._check_and_rescale_grad(trainer._scale / batch_size)
        trainer._init_kvstore()
    return is_p3(trainer._kvstore)


def _spread_stale(trainer: Any) -> None:
    """Make stale gradients zero, but for those that are to be added to."""
    for param in trainer._params:
        if param.grad_req == "write":
            for data, gradient in zip(_arrays(param), param.list_grad()):
                if not data._fresh_grad:
                    gradient[:] = 0


@contextlib.contextmanager
def _used_alone(trainer: Any) -> Iterator[Any]:
    """Within it the Trainer sees, as fresh, the parameters that some rank has used.

    Gives ``(used, unused)``, lists of parameters.
    """
    params = [param for param in trainer._params if param.grad_req != "null"]
    uses = [int(any(data._fresh_grad for data in _arrays(param))) for param in params]
    if "_async" not in trainer._kvstore.type:
        uses = trainer._p3_agreement.total(uses)
    used = [param for param, uses_of_it in zip(params, uses) if uses_of_it]
    unused = [param for param, uses_of_it in zip(params, uses) if not uses_of_it]
    before = [param._grad_req for param in unused]
    for param in used:
        _mark(param, fresh=True)
    for param in unused:
        param._grad_req = "null"  # the attribute alone: the property would free the gradient
    try:
        yield used, unused
    finally:
        for param, grad_req in zip(unused, before):
            param._grad_req = grad_req


def _pull(trainer: Any, params: List[Any]) -> None:
    for param in params:
        if param._stype == "default":
            index = trainer._param2idx[param.name]
            trainer._kvstore.pull(index, out=param.list_data(), priority=-index)


def _mark(param: Any, fresh: bool) -> None:
    for data in _arrays(param):
        data._fresh_grad = fresh


def _arrays(param: Any) -> List[Any]:
    """The parameter's arrays, one a device; raises what MXNet does if there are none yet."""
    arrays: List[Any] = param._check_and_get(param._data, list)
    return arrays
