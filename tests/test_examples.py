"""The examples: what they share, and each of them run as a user would."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
IMAGE_CLASSIFICATION = EXAMPLES / "image_classification.py"
sys.path[:0] = [str(ROOT), str(EXAMPLES)]
# isort: off
import p3  # noqa: E402,F401
import mxnet as mx  # noqa: E402

import data  # noqa: E402
import demo  # noqa: E402
import image_classification  # noqa: E402
import processes  # noqa: E402
from checkpoint import Checkpoint, write_whole  # noqa: E402
from progress import Progress, Rate  # noqa: E402

WATCHDOG_S = 120
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
        output, _ = process.communicate(timeout=WATCHDOG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{argv} did not end in {WATCHDOG_S} s:\n{output}")
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


# Shards


@pytest.mark.parametrize("count", [12, 13, 100])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_shards_are_disjoint_equal_and_make_up_the_global_batches(count, workers):
    shards = [data.shard_batches(count, rank, workers, 4, 7, 0) for rank in range(workers)]
    assert {shard.shape for shard in shards} == {(count // (4 * workers), 4)}
    images = np.concatenate([shard.ravel() for shard in shards])
    assert len(set(images)) == len(images)
    assert set(images) <= set(range(count))
    alone = data.shard_batches(count, 0, 1, 4 * workers, 7, 0)
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), alone)


def test_epochs_and_seeds_shuffle_differently_and_repeatably():
    def order(seed, epoch):
        return data.shard_batches(64, 1, 2, 4, seed, epoch).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 1) != order(1, 0)


def test_too_few_images_are_refused():
    with pytest.raises(data.DataError, match="7 images are too few for 2 worker"):
        data.shard_batches(7, 0, 2, 4, 0, 0)


# Data sets


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_images_have_the_size_asked_for(name):
    loaded = data.load(name, "")
    pixels, labels = loaded.train.batch(np.arange(5), 20)
    assert pixels.shape == (5, 3, 20, 20)
    assert pixels.dtype == labels.dtype == np.float32
    assert np.abs(pixels).max() <= 2
    assert set(loaded.train.labels) == set(range(loaded.classes))


def test_training_and_test_images_are_apart():
    train, test = data.held_out(100)
    assert sorted([*train, *test]) == list(range(100))
    assert len(test) == 20


def test_rescale_keeps_every_pixel():
    pixels = np.arange(4, dtype=np.uint8).reshape(1, 1, 2, 2)
    scaled = data.rescale(pixels, 4)
    np.testing.assert_array_equal(scaled[0, 1, ::2, ::2], pixels[0, 0])
    np.testing.assert_array_equal(scaled[0, 2, 1::2, 1::2], pixels[0, 0])


def write_idx(path, array, pack=bytes):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(pack(header + array.tobytes()))


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_from_idx_files(tmp_path, zipped):
    pixels = np.random.RandomState(0).randint(0, 256, (6, 28, 28)).astype(np.uint8)
    for part in ("train", "t10k"):
        suffix, pack = (".gz", gzip.compress) if zipped else ("", bytes)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", pixels, pack)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", np.arange(6, dtype="u1"), pack)
    loaded = data.load("mnist", str(tmp_path))
    np.testing.assert_array_equal(loaded.train.pixels[:, 0], pixels)
    np.testing.assert_array_equal(loaded.test.labels, np.arange(6))


def test_cifar10_is_read_from_its_binary_files(tmp_path):
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for label, name in enumerate(names):
        rows = np.full((2, 3073), label, np.uint8)
        rows[:, 1:] = np.arange(3072) % 251
        rows.tofile(str(tmp_path / f"{name}.bin"))
    loaded = data.load("cifar10", str(tmp_path))
    assert loaded.train.pixels.shape == (10, 3, 32, 32)
    assert loaded.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert loaded.test.labels.tolist() == [5, 5]
    assert loaded.train.pixels[0, 1, 0, 0] == 1024 % 251


def png(picture):
    """A (height, width, 3) array of bytes as a PNG file."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    height, width, _ = picture.shape
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in picture)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_records_are_decoded_and_split(tmp_path):
    path = tmp_path / "some.rec"
    record = mx.recordio.MXIndexedRecordIO(str(path.with_suffix(".idx")), str(path), "w")
    for i in range(10):
        picture = np.full((12, 9, 3), 20 * i, np.uint8)
        record.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, i, i, 0), png(picture)))
    record.close()
    loaded = data.load("recordio", str(path))
    assert (len(loaded.train), len(loaded.test)) == (8, 2)
    pixels, labels = loaded.train.batch(np.arange(8), 16)
    assert pixels.shape == (8, 3, 16, 16)
    np.testing.assert_allclose(pixels[:, 0, 3, 3], (20 * labels - 127.5) / 64)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("mnist", "train-images-idx3-ubyte"), ("cifar10", "data_batch_1.bin"), ("recordio", "")],
)
def test_missing_files_are_named(tmp_path, name, missing):
    with pytest.raises(data.DataError, match="is missing") as caught:
        data.load(name, str(tmp_path))
    assert str(tmp_path / missing) in str(caught.value)


# Progress, rate, files


def test_progress_shows_the_last_batch(capsys):
    progress = Progress("epoch 1/1", 2, every_s=1000)
    progress.update(1, loss=0.5)
    progress.update(2, loss=0.25)
    lines = capsys.readouterr().err.splitlines()
    assert "[##########..........] 1/2  loss 0.5" in lines[0]
    assert "[####################] 2/2  loss 0.25" in lines[-1]


def test_rate_leaves_out_start_up_and_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("progress.time.perf_counter", lambda: now[0])
    rate = Rate(skip=1)
    for seconds in (100, 100, 2, 2):  # the first is skipped, the second starts the clock
        now[0] += seconds
        rate.tick(10)
    rate.pause()
    for seconds in (100, 2):
        now[0] += seconds
        rate.tick(10)
    assert rate.per_second == 5


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(draft):
        Path(draft).write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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


@pytest.mark.parametrize("script", ["module_fit.py", "custom_trainer.py"])
def test_small_examples_run_under_the_launcher(script):
    output = launch(EXAMPLES / script, "--kvstore", "dist_sync_p3", "--epochs", 2)
    accuracies = re.findall(r"rank (\d): .*accuracy ([\d.]+)", output)
    assert sorted(rank for rank, _ in accuracies) == ["0", "1"]
    assert len({accuracy for _, accuracy in accuracies}) == 1, output
    assert float(accuracies[0][1]) > 0.5


# The demo


@pytest.fixture
def tiny_demo(monkeypatch):
    """The demo with a few steps of a small network, in this process's environment."""
    monkeypatch.setattr(demo, "SETTINGS", [*TINY[:-2], "--max-batches", "6"])
    monkeypatch.setattr(processes, "SILENCE_S", WATCHDOG_S)
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
