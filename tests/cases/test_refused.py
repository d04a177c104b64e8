"""Calls that native stores have and p3 answers otherwise: on the caller, with the reason."""

from __future__ import annotations

import mxnet as mx
import pytest

from p3.errors import UsageError

CALLS = {
    "set_updater": (lambda kv: kv.set_updater(print), "P3_ALLOW_OPTIMIZERS"),
    "_set_updater": (lambda kv: kv._set_updater(print), "set_optimizer"),
    "send_command_to_servers": (lambda kv: kv.send_command_to_servers(0, "x"), "no commands"),
    "_send_command_to_servers": (lambda kv: kv._send_command_to_servers(0, "x"), "no commands"),
}


def every_call():
    kv = mx.kv.create("dist_sync_p3")
    assert isinstance(kv, mx.kvstore.KVStore)
    assert kv.num_dead_node(0) == kv.get_num_dead_node() == 0
    kv.set_barrier_before_exit(False)
    assert not hasattr(kv, "handle")
    with pytest.raises(AttributeError, match="native stores"):
        kv.handle  # noqa: B018
    for call, words in CALLS.values():
        with pytest.raises(UsageError, match=words):
            call(kv)
    assert kv._updater is None
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    kv.set_optimizer(optimizer)
    assert kv._updater.optimizer is optimizer
    with pytest.raises(UsageError, match="on the servers"):
        kv._updater(0, None, None)
    kv._barrier()


def test_what_scripts_call_on_a_native_store(pair):
    pair.run(every_call)


def test_nothing_of_a_native_store_is_left_to_its_missing_handle():
    """A method that the base class has must be p3's own, or it would crash on ``handle``."""
    from p3.store import P3KVStore

    base = mx.kvstore.KVStore
    for name, member in vars(base).items():
        if callable(member) or isinstance(member, (property, staticmethod)):
            assert getattr(P3KVStore, name) is not getattr(base, name), name
