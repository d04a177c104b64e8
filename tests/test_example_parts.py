"""What the examples share: shards, data sets, progress and files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import data
import mxnet as mx
import numpy as np
import pytest
from checkpoint import write_whole
from progress import Progress, Rate

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
