"""The demo, with a few steps of a small network."""

from __future__ import annotations

import sys

import demo
import mxnet as mx
import processes
import pytest
from commands import TIMEOUT_S

SMALL = ["--network", "cifar_resnet20", "--image-size", "8"]


@pytest.fixture
def tiny_demo(monkeypatch):
    """The demo with a few steps of a small network, in this process's environment."""
    monkeypatch.setattr(demo, "SETTINGS", [*SMALL, "--max-batches", "6"])
    monkeypatch.setattr(processes, "SILENCE_S", TIMEOUT_S)
    for name, value in demo.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.skipif(demo.obstacle() is not None, reason="no network lab")
def test_demo_in_namespaces(tiny_demo, tmp_path, capfd):
    reference = demo.run_reference(tmp_path / "reference")
    results = {"one process": reference}
    for store in ("dist_sync_p3", "dist_sync"):
        results[store] = demo.run_in_lab(tmp_path / store, store, 100e6)
        assert demo.largest_difference(results[store], reference) == 0
    assert "epoch 1: test accuracy" in capfd.readouterr().out
    lines = demo.table(results).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["one", "dist_sync_p3", "dist_sync"]


def test_demo_over_loopback(tiny_demo, tmp_path):
    reference = demo.run_reference(tmp_path / "reference")
    result = demo.run_loopback(tmp_path / "p3", "dist_sync_p3")
    assert demo.largest_difference(result, reference) == 0


def test_demo_ends_with_the_log_of_what_failed(tmp_path):
    program = "import sys; print('on fire'); sys.exit(3)"
    with processes.job(tmp_path / "run") as running:
        running.start("server0", ["sleep", "1000"], {})
        running.start("worker1", [sys.executable, "-c", program], {})
        with pytest.raises(processes.RunError, match=r"worker1 ended with code 3:\n +on fire"):
            running.wait()
    assert all(process.poll() is not None for process in running.processes.values())


def test_demo_gives_up_on_what_does_not_end(tmp_path):
    with processes.job(tmp_path / "run") as running:
        running.start("server0", ["sleep", "1000"], {})
        with pytest.raises(processes.RunError, match=r"silent for 0\.1 s:\nserver0"):
            running.wait(0.1)


def test_demo_balances_sending_and_computing():
    report = {"images_per_s": 64.0}  # a step of 64 images takes a second
    half = {"weight": mx.nd.zeros((500, 1000))}  # 2 MB
    # each host sends half its gradients, and half the weights: 2 MB in that second
    assert demo.balanced_rate(demo.Result(report, [half, half])) == 16e6
