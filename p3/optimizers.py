"""What p3 knows about MXNet's optimizers on the caller's side: which, and what has changed.

The servers apply the caller's optimizer, which is sent once, as a pickle.  What they cannot
know comes with each push, from ``Changes``, and holds for that push alone, however far other
keys are ahead:

- the learning rate, by the optimizer's schedule where it has one.  A schedule follows the count
  of training steps, which no server sees as a whole, so it stays with the worker;
- the multipliers of the key, as ``Optimizer._get_lrs`` looks them up;
- numbers that the script changed on its object: weight decay, ``rescale_grad``, momentum, ...;
- what Nadam and LARS carry over from one parameter to the next, by the order of the pushes.

Used by the training thread alone.  Nothing here changes the caller's optimizer, but for one
that a Trainer owns: there ``num_update`` advances as it does in one process, so that
``trainer.learning_rate`` tells the truth.
"""

from __future__ import annotations

import copy
import json
import operator
import pickle
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from p3.errors import UsageError

#: optimizers of MXNet that treat every element by itself, so slices may be updated apart
ELEMENTWISE = frozenset(
    (
        "SGD NAG Adam AdaGrad AdaDelta RMSProp Ftrl FTML Signum Adamax DCASGD SGLD Nadam ccSGD Test"
    ).split()
)
#: attributes that ``Changes`` tells in its own way, or that each process counts for itself
_FOLLOWED = frozenset(
    (
        "lr lr_scheduler lr_mult wd_mult param_dict num_update begin_num_update aggregate_num"
        " _index_update_count _all_index_update_counts m_schedule cur_lr last_lr"
    ).split()
)
#: attributes of which ranks may pass different ones to ``set_optimizer``: rank 0's count
_MAY_DIFFER = _FOLLOWED - {"lr"} | {"rescale_grad", "idx2name", "sym_info"}
#: optimizers that carry something over from one parameter to the next: see ``_Local``
_CARRYING = frozenset(("Nadam", "LARS"))
_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()


def needs_whole_keys(optimizer: Any) -> bool:
    """Whether ``optimizer`` looks at a parameter in one piece (norms, rows) or may do so."""
    return mxnet_name(optimizer) not in ELEMENTWISE


def mxnet_name(optimizer: Any) -> str:
    """The name of ``optimizer``'s class if it is one of MXNet's own, else nothing."""
    kind = type(optimizer)
    return kind.__name__ if kind.__module__.startswith("mxnet.") else ""


def draws(optimizer: Any) -> bool:
    """Whether an update draws random numbers, or may do so."""
    return mxnet_name(optimizer) in ("SGLD", "")


def dump(optimizer: Any) -> bytes:
    """The optimizer as a pickle; raises ``UsageError`` if it cannot be one."""
    try:
        return pickle.dumps(optimizer, protocol=4)
    except Exception as error:
        raise UsageError(
            f"set_optimizer: {type(optimizer).__name__} cannot be sent to the servers: {error}."
            " It must be picklable: no lambdas or local functions, in its scheduler either. Put"
            " what you need into a module that the servers can import, and allow that module on"
            " every process: P3_ALLOW_OPTIMIZERS=my_module"
        ) from error


def differences(here: Any, there: Any) -> List[str]:
    """How optimizer ``here`` differs from ``there``, as ``name is value here, value there``.

    Class, schedule and hyper-parameters are compared; not what each push tells anyway.
    """
    ours, theirs = _parameters(here), _parameters(there)
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name} is {ours.get(name)!r} here, {theirs.get(name)!r} there"
        for name in names
        if ours.get(name, _MISSING) != theirs.get(name, _MISSING)
    ]


def refuse_another(here: Any, there: Any) -> None:
    """Raise ``UsageError`` if ``here`` is not the optimizer ``there``, which is in use."""
    found = differences(here, there)
    if found:
        raise UsageError(
            f"set_optimizer: this store's servers apply {type(there).__name__} already, with other"
            f" settings: {'; '.join(found)}. All ranks must pass the same optimizer; change its"
            " attributes later, or make another store for another one"
        )


def _parameters(optimizer: Any) -> Dict[str, Any]:
    found = {"class": type(optimizer).__name__}
    schedule = optimizer.lr_scheduler
    if schedule is not None:
        found["lr_scheduler"] = type(schedule).__name__
        found.update({f"lr_scheduler.{n}": v for n, v in vars(schedule).items() if _plain(v)})
    for name, value in vars(optimizer).items():
        if name not in _MAY_DIFFER and _plain(value):
            found[name] = value
    return found


#: what the servers of a key know: all that was told, and its (lr_mult, wd_mult)
_Seen = Tuple[Dict[str, Any], Optional[Tuple[Any, Any]]]
_NOTHING: _Seen = ({}, None)


class Changes:
    """What each push has to tell the servers about the caller's optimizer."""

    def __init__(self, optimizer: Any, seed: Optional[int] = None) -> None:
        """``seed``: for the random numbers of an optimizer that draws some."""
        _refuse_loss_scaling(optimizer)
        self._optimizer = optimizer
        self._known = dict(vars(optimizer))  # the attributes at the last look
        self._values = tuple(self._known.values())
        #: all that is not as in the pickle, or may be another in that of another rank; a new
        #: dictionary whenever something changes, so that it tells by itself what a key knows
        self._told: Dict[str, Any] = {"rescale_grad": optimizer.rescale_grad}
        if seed is not None:
            self._told["seed"] = seed
        self._seen: Dict[Any, _Seen] = {}
        self._text: Tuple[_Seen, _Seen, bytes] = (_NOTHING, _NOTHING, b"")  # from, to, in JSON
        self._local = _Local(optimizer)

    def follow(self, optimizer: Any) -> None:
        """From now on tell of ``optimizer``; raises ``UsageError`` if it is another one."""
        if optimizer is self._optimizer:
            return
        refuse_another(optimizer, self._optimizer)
        _refuse_loss_scaling(optimizer)
        self._optimizer = optimizer
        self._known.update((n, v) for n, v in vars(optimizer).items() if not _plain(v))

    def since_last_push(self, key: Any) -> bytes:
        """JSON of what the servers do not know yet at this push of ``key``; empty if nothing.

        Call it once a push, in the script's order.  Raises ``UsageError`` if the script
        changed something that cannot be told.
        """
        optimizer = self._optimizer
        try:
            known = tuple(vars(optimizer).values()) == self._values  # identity is enough
        except Exception:  # noqa: BLE001  # whatever comparing two arrays raises
            known = False
        if not known:
            self._look()
        rate, shared = self._local.push(optimizer, key)
        if shared or rate != self._told.get("lr"):
            self._tell({"lr": rate, **shared})
        now = self._told, _multipliers(optimizer, key)
        seen = self._seen.get(key, _NOTHING)
        if _equal(seen, now):
            return b""
        self._seen[key] = now
        if not (_equal(seen, self._text[0]) and _equal(now, self._text[1])):
            self._text = (seen, now, _difference(seen, now))
        return self._text[2]

    def as_applied(self) -> Any:
        """A copy of the optimizer as it were had this process applied all pushes so far."""
        return self._local.applied(self._optimizer)

    def _look(self) -> None:
        """Find what the script changed on its optimizer."""
        _refuse_loss_scaling(self._optimizer)
        attributes, changed = dict(vars(self._optimizer)), {}
        for name, value in attributes.items():
            known = self._known.get(name, _MISSING)
            if name in _FOLLOWED or value is known or (_plain(known) and value == known):
                continue
            if not _plain(value):
                raise UsageError(
                    f"the optimizer's attribute {name!r} was changed after set_optimizer to"
                    f" {value!r}; only numbers, texts and None can follow to the servers"
                )
            changed[name] = value
        self._known, self._values = attributes, tuple(attributes.values())
        self._tell(changed)

    def _tell(self, values: Dict[str, Any]) -> None:
        if any(self._told.get(name, _MISSING) != value for name, value in values.items()):
            self._told = {**self._told, **values}


class _Local:
    """What the optimizer would know by now had this process applied every push itself.

    Optimizers count each index's updates, and take the largest count for their schedule.
    Two of MXNet's let one parameter's update depend on the one before it:

    - Nadam multiplies ``m_schedule``, which all parameters share, once an update;
    - LARS scales momentum by the rate over that of its last call, which takes
      ``aggregate_num`` parameters together.
    """

    def __init__(self, optimizer: Any) -> None:
        self._kind = mxnet_name(optimizer)
        self._counts = dict(optimizer._index_update_count)
        self._num_update = optimizer.num_update
        self._place = 0  # of this push among its step's
        self._m_schedule = getattr(optimizer, "m_schedule", None)  # Nadam's, before this push
        self._rate = self._rate_before = getattr(optimizer, "cur_lr", None)  # of the last step
        self._schedule: Any = None  # our copy,
        self._theirs: Tuple[Any, Dict[str, Any]] = (None, {})  # of this one, as it was

    def push(self, optimizer: Any, key: Any) -> Tuple[Any, Dict[str, Any]]:
        """Count an update of ``key``; its learning rate, and what the servers need besides."""
        count = self._counts.get(key)
        count = (optimizer.begin_num_update if count is None else count) + 1
        early = self._rate_now(optimizer) if self._kind == "LBSGD" else None  # before it counts
        self._counts[key] = count
        if count > self._num_update:
            self._num_update, self._place, self._rate_before = count, 0, self._rate
            if optimizer.param_dict:
                optimizer.num_update = count
        else:
            self._place += 1
        rate = self._rate = self._rate_now(optimizer)
        if self._kind in _CARRYING:
            return rate, self._carry(optimizer, count)
        return (rate if early is None else early), _NOTHING[0]

    def _carry(self, optimizer: Any, count: int) -> Dict[str, Any]:
        """What this push's update finds of the ones before it."""
        if self._kind == "Nadam":
            found = {"m_schedule": self._m_schedule}
            warm = 1.0 - 0.5 * pow(0.96, count * optimizer.schedule_decay)
            self._m_schedule *= optimizer.beta1 * warm
            return found
        first = self._place < max(1, optimizer.aggregate_num)
        return {"cur_lr": self._rate_before if first else self._rate}

    def applied(self, optimizer: Any) -> Any:
        """See ``Changes.as_applied``."""
        result, counts = copy.copy(optimizer), dict(self._counts)
        result._index_update_count, result._all_index_update_counts = counts, {0: counts}
        result.num_update = self._num_update
        if self._schedule is not None:
            result.lr_scheduler = copy.deepcopy(self._schedule)
        if self._kind == "Nadam":
            result.m_schedule = self._m_schedule
        elif self._kind == "LARS":
            result.cur_lr = self._rate
        return result

    def _rate_now(self, optimizer: Any) -> Any:
        """The optimizer's learning rate by the count of training steps.

        Calling a schedule changes it.  A Trainer's is its own; another may be in use
        elsewhere, so a copy is called, to which what the script changes is copied, too.
        """
        schedule = optimizer.lr_scheduler
        if schedule is None:
            self._schedule = None
            return optimizer.lr
        if not optimizer.param_dict:
            (theirs, state), attributes = self._theirs, getattr(schedule, "__dict__", {})
            if self._schedule is None or schedule is not theirs:
                self._schedule = copy.deepcopy(schedule)
                self._theirs = schedule, dict(attributes)
            elif not _same(attributes, state):
                changed = {n: v for n, v in attributes.items() if v is not state.get(n, _MISSING)}
                vars(self._schedule).update(copy.deepcopy(changed))
                self._theirs = schedule, dict(attributes)
            schedule = self._schedule
        return schedule(self._num_update)


def _multipliers(optimizer: Any, key: Any) -> Tuple[Any, Any]:
    """``(lr_mult, wd_mult)`` that ``optimizer`` gives ``key``, in its own order of look-ups."""
    found = optimizer.param_dict.get(key)
    if found is not None:
        return found.lr_mult, found.wd_mult
    rates, decays = optimizer.lr_mult, optimizer.wd_mult
    if not rates and not decays:
        return 1.0, 1.0
    name = optimizer.idx2name.get(key)
    rate = rates[key] if key in rates else rates.get(name, 1.0)
    return rate, decays[key] if key in decays else decays.get(name, 1.0)


def _difference(seen: _Seen, now: _Seen) -> bytes:
    changed = {n: v for n, v in now[0].items() if seen[0].get(n, _MISSING) != v}
    if seen[1] != now[1]:
        changed["multipliers"] = now[1]
    return json.dumps(changed, default=np.generic.item).encode() if changed else b""


def _equal(one: _Seen, other: _Seen) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def _refuse_loss_scaling(optimizer: Any) -> None:
    """Raise ``UsageError`` if the Trainer that owns ``optimizer`` scales its loss dynamically.

    It would look for an overflow after the update, and in this rank's gradients alone.
    """
    if getattr(_trainer(optimizer), "_amp_loss_scaler", None) is not None:
        raise UsageError(
            "AMP's dynamic loss scaling (amp.init_trainer) skips a step whose gradients overflow,"
            " but with the optimizer on the servers that step has happened when it looks. Make the"
            " Trainer with update_on_kvstore=False"
        )


def _trainer(optimizer: Any) -> Any:
    for parameter in optimizer.param_dict.values():
        trainer = getattr(parameter, "_trainer", None)
        if getattr(trainer, "_optimizer", None) is optimizer:
            return trainer
    return None


def _plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, np.generic))


def _same(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    """Whether the dictionaries hold the same objects, in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))
