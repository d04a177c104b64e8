"""The examples, each of them run as a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import image_classification
import mxnet as mx
import numpy as np
import pytest
from checkpoint import Checkpoint
from commands import ROOT, TIMEOUT_S

EXAMPLES = ROOT / "examples"
IMAGE_CLASSIFICATION = EXAMPLES / "image_classification.py"
TINY = ["--network", "cifar_resnet20", "--image-size", "8", "--batch-size", "8"]


def run(*argv):
    """Run Python and return its output; it has to succeed within the watchdog."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "P3_"))}
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        [sys.executable, *map(str, argv)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{argv} did not end in {TIMEOUT_S} s:\n{output}")
    assert process.returncode == 0, output
    return output


def classify(*argv):
    """Train in this process; stores of p3 get one of their own, by `run`."""
    image_classification.main([*TINY, *map(str, argv)])


def launch(*argv):
    """Run a script under p3's launcher, with two workers and two servers."""
    return run("-m", "p3", "launch", "-n", 2, "-s", 2, *argv)


def weights(path):
    return {name: array.asnumpy() for name, array in mx.nd.load(str(path)).items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# Alone


@pytest.mark.parametrize(
    ("script", "store"),
    [
        ("module_fit.py", "device"),
        ("module_fit.py", "dist_sync_p3"),
        ("custom_trainer.py", "local"),
        ("custom_trainer.py", "dist_sync_p3"),
    ],
)
def test_small_examples_run_alone(script, store):
    output = run(EXAMPLES / script, "--kvstore", store, "--epochs", 2)
    assert float(output.split("accuracy ")[-1]) > 0.5


def test_image_classification_gives_the_same_weights_with_p3_embedded(tmp_path):
    argv = ["--max-batches", 3, "--report", tmp_path / "report", "--save-params"]
    classify("--kvstore", "device", *argv, tmp_path / "device")
    run(IMAGE_CLASSIFICATION, *TINY, "--kvstore", "dist_sync_p3", *argv, tmp_path / "p3")
    assert_equal(weights(tmp_path / "p3"), weights(tmp_path / "device"))
    reports = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert [report.pop("store") for report in reports] == ["device", "dist_sync_p3"]
    assert [report.pop("seconds") > 0 for report in reports] == [True, True]
    assert reports[0] == reports[1]
    assert np.isfinite([reports[0]["loss"], reports[0]["test_loss"]]).all()
    assert reports[0]["steps"] == 3


def test_contexts_share_a_step_and_keep_their_own_statistics(tmp_path):
    classify("--contexts", 2, "--max-batches", 2, "--save-params", tmp_path / "w{replica}")
    one, two = weights(tmp_path / "w0"), weights(tmp_path / "w1")
    different = {name for name in one if (one[name] != two[name]).any()}
    assert different
    assert all("running" in name for name in different)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("where", [[], ["--update-on-worker"]])
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, optimizer, where):
    def training(name, epochs, *more):
        options = ["--dataset", "synthetic", "--batch-size", 256, "--optimizer", optimizer]
        options += ["--lr", 0.001, "--epochs", epochs, *where, *more]
        classify(*options, "--save-params", tmp_path / name)

    training("whole", 3)
    training("half", 1, "--checkpoint", tmp_path / "run")
    training("resumed", 3, "--checkpoint", tmp_path / "run", "--resume")
    assert_equal(weights(tmp_path / "resumed"), weights(tmp_path / "whole"))
    files = sorted(path.name for path in tmp_path.glob("run*"))
    assert files == ["run-0002.params", "run-0002.states", "run.json"]


class Stateless:
    """A trainer that cannot save its states, as MXNet's is with dist_sync."""

    def save_states(self, path):
        raise AssertionError("Cannot save states for distributed training")


def test_a_checkpoint_without_states_says_so_once(tmp_path, capsys):
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    checkpoint = Checkpoint(str(tmp_path / "run"))
    checkpoint.save(0, net, Stateless())
    assert "hold no optimizer states (Cannot save" in capsys.readouterr().err
    checkpoint.save(1, net, Stateless())
    assert capsys.readouterr().err == ""
    assert checkpoint.load(net, Stateless(), [mx.cpu()]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume"], "--resume needs --checkpoint"),
        (["--batch-size", "7", "--contexts", "2"], "cannot be shared equally among 2 contexts"),
        (["--batch-size", "0"], "0 is not above 0"),
        (["--dataset", "imagenet"], "invalid choice: 'imagenet'"),
    ],
)
def test_senseless_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        classify(*flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--network", "resnet19"], "cifar_resnet20"),
        (["--network", "densenet121"], "try --image-size 224"),
        (["--dataset", "mnist"], "--dataset mnist needs --data-dir"),
        (["--dataset", "mnist", "--data-dir", "/nowhere"], "/nowhere/train-images-idx3-ubyte is"),
        (["--batch-size", "5000"], "too few"),
        (["--classes", "3"], "--classes 3"),
        (["--checkpoint", "/nowhere/run", "--resume"], "/nowhere/run.json is missing"),
        (["--kvstore", "dist_sycn_p3"], "dist_sync_p3"),
    ],
)
def test_what_cannot_work_is_said_without_a_traceback(flags, message):
    with pytest.raises(SystemExit) as ended:
        classify("--max-batches", 1, *flags)
    assert message in ended.value.code
    assert "Traceback" not in ended.value.code


# Under the launcher


@pytest.mark.parametrize("flags", [["--kvstore", "dist_sync_p3"], ["--kvstore", "dist_sync"]])
def test_workers_end_with_the_weights_of_one_process(tmp_path, flags):
    native = ["--native"] if "dist_sync" in flags else []
    argv = ["--max-batches", 3, "--save-params"]
    save, report = tmp_path / "worker{replica}", tmp_path / "report"
    launch(*native, IMAGE_CLASSIFICATION, *TINY, *flags, *argv, save, "--report", report)
    classify("--contexts", 2, "--batch-size", 16, *argv, tmp_path / "context{replica}")
    for replica in range(2):
        assert_equal(
            weights(tmp_path / f"worker{replica}"), weights(tmp_path / f"context{replica}")
        )
    results = json.loads(report.read_text())
    assert results["workers"] == 2
    assert np.isfinite([results["loss"], results["test_loss"]]).all()


def test_native_workers_end_although_they_write_nothing():
    """A native store loses a last push that is under way when its worker ends."""
    flags = ["--kvstore", "dist_sync", "--max-batches", 2]
    launch("--native", IMAGE_CLASSIFICATION, *TINY, *flags)


@pytest.mark.parametrize("script", ["module_fit.py", "custom_trainer.py"])
def test_small_examples_run_under_the_launcher(script):
    output = launch(EXAMPLES / script, "--kvstore", "dist_sync_p3", "--epochs", 2)
    accuracies = re.findall(r"rank (\d): .*accuracy ([\d.]+)", output)
    assert sorted(rank for rank, _ in accuracies) == ["0", "1"]
    assert len({accuracy for _, accuracy in accuracies}) == 1, output
    assert float(accuracies[0][1]) > 0.5
