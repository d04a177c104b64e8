"""p3 first, then MXNet, then two steps of training: on every Python that this machine has.

Each pair of Python and numpy gets a virtual environment in .cache/pythons, made once.  MXNet is
the same code on all of them, so theirs is a link to the one that runs the tests.  With
P3_TEST_OFFLINE=1 nothing is downloaded, and what is not there yet is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import pytest
from commands import ROOT, run_merged

CACHE = ROOT / ".cache" / "pythons"
OFFLINE = "P3_TEST_OFFLINE"
WATCHDOG_S = 600

CASES = [
    ("3.8", "1.23.5"),
    ("3.9", "1.23.5"),
    ("3.9", "1.26.4"),
    ("3.10", "1.23.5"),
    ("3.10", "1.26.4"),
    ("3.11", "1.23.5"),
    ("3.11", "1.26.4"),
    ("3.12", "1.26.4"),
]

TRAIN = """
import p3
import mxnet as mx
import numpy as np

def train(kvstore):
    mx.random.seed(1)
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(5, activation="relu"), mx.gluon.nn.Dense(3))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd",
                               {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kvstore)
    accuracy, loss_of = mx.metric.Accuracy(), mx.gluon.loss.SoftmaxCrossEntropyLoss()
    data = np.arange(32, dtype="float32").reshape(8, 4) / 32
    for _ in range(2):
        x, label = mx.nd.array(data), mx.nd.array(np.arange(8) % 3)
        with mx.autograd.record():
            out = net(x)
            loss = loss_of(out, label)
        loss.backward()
        trainer.step(8)
        accuracy.update(label, out)
    assert np.isfinite(loss.asnumpy()).all() and 0 <= accuracy.get()[1] <= 1
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}

plain, ours = train(None), train("dist_sync_p3")
assert plain.keys() == ours.keys()
for name in plain:
    np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5, atol=1e-6, err_msg=name)
flags = mx.np.array([1, 0], dtype=bool)  # MXNet's own use of the alias that numpy dropped
assert flags.dtype == np.bool_ and mx.np.ones(2)[flags].shape == (1,)
print("trained", p3.__version__, mx.__version__, np.__version__)
"""


@functools.lru_cache(maxsize=None)
def interpreter(version: str) -> Optional[str]:
    """A Python of this version that runs (a shim of pyenv may not), or None."""
    candidates = [sys.executable, shutil.which("python3"), shutil.which(f"python{version}")]
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")))
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        ran = subprocess.run(
            [candidate, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WATCHDOG_S,
            check=False,
        )
        if ran.returncode == 0 and ran.stdout.decode().strip() == version:
            return candidate
    return None


def mxnet_folder() -> Path:
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:
        pytest.skip("no MXNet in the environment of the tests to be linked")
    return Path(spec.origin).parent


def requirements(version: str, numpy: str) -> List[str]:
    ours = [f"numpy=={numpy}", "pyzmq>=22", "requests"]
    return [*ours, "setuptools"] if version == "3.12" else ours


def environment(version: str, numpy: str) -> Path:
    """The Python of a virtual environment for this pair; made if it is not there yet."""
    base = interpreter(version)
    if base is None:
        pytest.skip(f"this machine has no Python {version}")
    folder = CACHE / f"{version}-numpy{numpy}"
    python, ready = folder / "bin" / "python", folder / "ready"
    mxnet, needs = mxnet_folder(), requirements(version, numpy)
    key = f"{base} {mxnet} {needs}"
    if ready.exists() and ready.read_text() == key:
        return python
    if os.environ.get(OFFLINE):
        pytest.skip(f"{OFFLINE} is set, and {folder.relative_to(ROOT)} is not there yet")
    shutil.rmtree(folder, ignore_errors=True)
    run([base, "-m", "venv", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-compile", *needs])
    (folder / "lib" / f"python{version}" / "site-packages" / "mxnet").symlink_to(mxnet)
    ready.write_text(key)
    return python


def run(command: List[str], **how: object) -> str:
    """What the command printed; fails the test with its errors if it fails."""
    ran = run_merged(command, WATCHDOG_S, **how)
    if ran.returncode != 0:
        pytest.fail(
            f"{' '.join(command[:4])} ... ended with {ran.returncode}\n{ran.stdout}\n"
            f"(without a network, set {OFFLINE}=1)"
        )
    return ran.stdout


def train(version: str, numpy: str, folder: Path) -> str:
    """What the training printed on this pair."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    foreign = ("DMLC_", "P3_", "MXNET_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env["PYTHONPATH"] = str(ROOT)
    return run([str(environment(version, numpy)), str(script)], env=env, cwd=str(folder))


@pytest.fixture(scope="module")
def trainings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dict[Tuple[str, str], Future[str]]]:
    """All cases that this run wants, side by side; a skip or failure comes with its result."""
    items = [item for item in request.session.items if item.module is request.module]
    cases = [(item.callspec.params["version"], item.callspec.params["numpy"]) for item in items]
    for version, _ in cases:
        interpreter(version)  # here, once for all: the cache of it is not for threads
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield {case: pool.submit(train, *case, tmp_path_factory.mktemp("p")) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize(("version", "numpy"), CASES)
def test_p3_then_mxnet_then_two_steps(
    version: str, numpy: str, trainings: Dict[Tuple[str, str], Future[str]]
) -> None:
    output = trainings[version, numpy].result()
    assert f"1.9.1 {numpy}" in output
    assert "Warning" not in output
