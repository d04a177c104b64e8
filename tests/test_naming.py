"""The names of the stores: what MXNet makes of them, and what is refused (W2)."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import p3.config
from p3 import naming
from p3.config import Settings
from p3.errors import UsageError

mx = pytest.importorskip("mxnet")
ROOT = Path(__file__).resolve().parent.parent


class FakeStore(mx.kvstore.KVStoreBase):
    def __init__(self, kind):
        self.kind = kind

    @property
    def type(self):
        return self.kind

    @staticmethod
    def is_capable(capability):
        return True


@pytest.fixture
def fake_store(monkeypatch):
    import p3.store

    monkeypatch.setattr(p3.store, "P3KVStore", FakeStore)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(p3.config, "_current", Settings(launched=True))


def create_for_trainer(name, devices=1):
    """What Trainer and Module do with a store's name."""
    weight = {"weight": mx.nd.zeros((2,))}
    return mx.gluon.trainer._create_kvstore(name, devices, weight)[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dist_sync_p3", "dist_sync_p3"),
        ("dist_device_sync_p3", "dist_device_sync_p3"),
        ("dist_async_p3", "dist_async_p3"),
        ("dist_p3", "dist_sync_p3"),
        ("p3", "dist_sync_p3"),
        ("P3", "dist_sync_p3"),
        ("Dist_Sync_P3", "dist_sync_p3"),
    ],
)
def test_a_store_of_each_name_with_a_truthful_type(fake_store, name, kind):
    assert mx.kv.create(name).type == kind
    for devices in (1, 2):
        assert create_for_trainer(name, devices).type == kind
    store, on_store = mx.model._create_sparse_kvstore(name)
    assert store.type == kind and on_store


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dist_sycn_p3", "dist_sync_p3"),
        ("dist_p4", "dist_p3"),
        ("p4", "p3"),
        ("sync_p3", "dist_sync_p3"),
        ("dist_asnyc", "dist_async"),
        ("devcie", "device"),
    ],
)
def test_a_typing_error_is_refused_with_the_names_and_the_nearest(name, meant):
    for create in (mx.kv.create, mx.kvstore.base.create, create_for_trainer):
        with pytest.raises(ValueError) as caught:
            create(name)
        message = str(caught.value)
        assert f"did you mean '{meant}'?" in message
        assert all(known in message for known in naming.STORES)


@pytest.mark.parametrize("name", ["", "_", "sync", "cpu", "nonsense"])
def test_what_is_no_name_at_all_is_refused(name):
    with pytest.raises(UsageError, match="is unknown"):
        mx.kv.create(name)


@pytest.mark.parametrize(
    "name",
    "local device Local nccl dist dist_sync dist_device_sync dist_sync_device dist_async"
    " dist_async_device dist_device_async local_update_cpu local_allreduce_cpu"
    " local_allreduce_device horovod byteps teststore".split(),
)
def test_the_names_of_others_are_let_through(name):
    naming.check(name)


def test_local_stores_work_as_before():
    assert create_for_trainer(None) is None
    assert create_for_trainer("local") is None
    assert create_for_trainer("device") is None
    assert create_for_trainer("device", 2).type == "device"
    assert mx.kv.create().type == "local"
    assert mx.kv.create("teststore").type == "teststore"
    assert create_for_trainer(mx.kv.create("local")).type == "local"
    with pytest.raises(TypeError):
        mx.kv.create(3)
    with pytest.raises(TypeError):
        create_for_trainer(3)


def test_stores_that_others_register_are_known():
    @mx.kvstore.KVStoreBase.register
    class Another(FakeStore):
        def __init__(self):
            super().__init__("another")

    try:
        assert mx.kv.create("Another").type == "another"
    finally:
        del mx.kvstore.KVStoreBase.kv_registry["another"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dist_sync", "dist_sync_p3"),
        ("dist", "dist_sync_p3"),
        ("DIST_SYNC", "dist_sync_p3"),
        ("dist_sync_device", "dist_device_sync_p3"),
        ("dist_async", "dist_async_p3"),
    ],
)
def test_mxnets_distributed_stores_are_refused_under_p3s_launcher(launched, name, instead):
    for create in (mx.kv.create, create_for_trainer):
        with pytest.raises(UsageError) as caught:
            create(name)
        assert repr(instead) in str(caught.value) and "p3 launch --native" in str(caught.value)
    naming.check("local")
    naming.check("dist_sync_p3")


def test_p3s_stores_can_be_forbidden(monkeypatch, fake_store):
    monkeypatch.setattr(naming, "_forbidden", None)
    naming.forbid("for a reason")
    with pytest.raises(UsageError, match="'p3': for a reason"):
        mx.kv.create("p3")


def test_registering_again_changes_nothing():
    create = mx.kv.create
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        naming.register()
    assert mx.kv.create is create is mx.kvstore.base.create
    assert mx.module.module._create_kvstore is mx.gluon.trainer._create_kvstore


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", "import warnings; warnings.simplefilter('ignore')\n" + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_several_tasks_without_a_role_are_an_error():
    code = """
import os, p3, mxnet
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
    os.environ[name] = "2"
    mxnet.kv.create("local")
    try:
        mxnet.kv.create("dist_sync_p3")
    except ValueError as error:
        print(error)
    del os.environ[name]
"""
    lines = run(code).stdout.splitlines()
    assert len(lines) == 3 and all("p3 run" in line for line in lines)
    assert "(OMPI_COMM_WORLD_SIZE=2)" in lines[0]


def test_the_name_p3_gives_trainer_and_module_a_store_on_one_device():
    code = """
import p3, mxnet as mx
net = mx.gluon.nn.Dense(1, in_units=2)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="p3")
with mx.autograd.record():
    loss = net(mx.nd.ones((4, 2))).sum()
loss.backward()
trainer.step(4)
symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2)
module = mx.mod.Module(mx.sym.SoftmaxOutput(symbol, name="softmax"))
module.bind([("data", (4, 2))], [("softmax_label", (4,))])
module.init_params()
module.init_optimizer(kvstore="p3")
print(trainer._kvstore.type, module._kvstore.type, module._optimizer.rescale_grad)
"""
    done = run(code)
    assert done.stdout.split() == ["dist_sync_p3", "dist_sync_p3", "0.25"], done.stderr
