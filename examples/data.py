"""Labelled images for the examples, and the rule by which workers share them.

`load` gives a training and a test split of one data set; `shard_batches` says which images
one worker reads, and in which order. A split is anything with `len` and
`batch(index, size)`: images are scaled up batch by batch, so that a small data set stays
small in memory whatever the image size.
"""

from __future__ import annotations

import gzip
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, NamedTuple, Tuple, Union

import mxnet as mx
import numpy as np

NAMES = ("digits", "synthetic", "mnist", "cifar10", "recordio")
Batch = Tuple[np.ndarray, np.ndarray]


class DataError(Exception):
    """The data cannot be read; the message names the path and what belongs there."""


def shard_batches(
    count: int, rank: int, workers: int, batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    """The images that worker `rank` of `workers` reads in one epoch: (batches, batch_size).

    All workers shuffle alike and then take their own part of each global batch. So the
    shards are disjoint, every worker has the same number of batches (a remainder of images
    is left out, another one each epoch) and together they see what a single process with
    the global batch would see. Raises DataError if there is not one image for each place.
    """
    batches = count // (batch_size * workers)
    if batches == 0:
        raise DataError(
            f"{count} images are too few for {workers} worker(s) with "
            f"--batch-size {batch_size}: lower it to {count // workers} or less"
        )
    order = np.random.RandomState([seed, epoch]).permutation(count)
    order = order[: batches * batch_size * workers]
    return order.reshape(batches, workers, batch_size)[:, rank]


class Images:
    """Images in memory: pixels (count, channels, height, width) as uint8, and labels."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray):
        self.pixels = pixels
        self.labels = labels.astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: np.ndarray, size: int) -> Batch:
        """Images (len(index), 3, size, size) around 0 with deviation near 1, and labels."""
        return normalise(rescale(self.pixels[index], size)), self.labels[index]


class Records:
    """Images in a RecordIO file, as im2rec writes it, decoded when they are needed."""

    def __init__(self, path: str, index: np.ndarray):
        self.records = mx.gluon.data.RecordFileDataset(path)
        self.index = index
        self.decoders = ThreadPoolExecutor(2)

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: np.ndarray, size: int) -> Batch:
        """As `Images.batch`; stretched to a square."""
        read = [mx.recordio.unpack(self.records[int(i)]) for i in self.index[index]]
        pixels = self.decoders.map(lambda record: decode(record[1], size), read)
        labels = [np.ravel(header.label)[0] for header, _ in read]
        return normalise(np.stack(list(pixels))), np.array(labels, dtype=np.float32)


Split = Union[Images, Records]


class Data(NamedTuple):
    """A data set: both splits, and how many classes the labels have (0: unknown)."""

    train: Split
    test: Split
    classes: int


def rescale(pixels: np.ndarray, size: int) -> np.ndarray:
    """Nearest-neighbour scaling of (n, c, h, w) to size x size, grey repeated as RGB."""
    _, channels, height, width = pixels.shape
    rows, columns = np.arange(size) * height // size, np.arange(size) * width // size
    scaled = pixels[:, :, rows[:, None], columns]
    return np.repeat(scaled, 3, axis=1) if channels == 1 else scaled


def decode(encoded: bytes, size: int) -> np.ndarray:
    """A JPEG or PNG as (3, size, size) uint8."""
    image = mx.image.imresize(mx.image.imdecode(encoded), size, size)
    return image.asnumpy().transpose(2, 0, 1)


def normalise(pixels: np.ndarray) -> np.ndarray:
    """0..255 to about -2..2, as float32."""
    return (pixels.astype(np.float32) - 127.5) / 64


def load(name: str, data_dir: str, seed: int = 0) -> Data:
    """A data set by name, for `mnist`, `cifar10` and `recordio` from files at `data_dir`.

    Nothing is ever downloaded. Raises DataError if files are missing.
    """
    if name in ("mnist", "cifar10", "recordio") and not data_dir:
        raise DataError(f"--dataset {name} needs --data-dir")
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic(seed)
    reader = {"mnist": mnist, "cifar10": cifar10, "recordio": recordio}.get(name)
    if reader is None:
        raise DataError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")
    return reader(Path(data_dir))


def held_out(count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Training and test indices of a data set that comes in one piece: every run the same."""
    order = np.random.RandomState(0).permutation(count)
    return order[count // 5 :], order[: count // 5]


def split(pixels: np.ndarray, labels: np.ndarray, classes: int) -> Data:
    """The data set whose images are all in these arrays."""
    train, test = held_out(len(labels))
    return Data(Images(pixels[train], labels[train]), Images(pixels[test], labels[test]), classes)


def digits() -> Data:
    """The 1,797 handwritten digits of 8x8 pixels that scikit-learn ships."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("--dataset digits needs scikit-learn: pip install scikit-learn") from None
    pixels, labels = load_digits(return_X_y=True)
    return split((pixels * 15).astype(np.uint8).reshape(-1, 1, 8, 8), labels, 10)


def synthetic(seed: int, count: int = 1600, classes: int = 10) -> Data:
    """One random 8x8 picture a class, and noise over it: quickly learned, at any image size."""
    random = np.random.RandomState(seed)
    labels = np.arange(count) % classes
    pictures = random.uniform(64, 192, (classes, 3, 8, 8))
    pixels = pictures[labels] + random.normal(0, 20, (count, 3, 8, 8))
    return split(pixels.clip(0, 255).astype(np.uint8), labels, classes)


def mnist(folder: Path) -> Data:
    """MNIST (or Fashion-MNIST) from its four idx files, as they are or gzipped."""
    parts = []
    for part in ("train", "t10k"):
        pixels = read_idx(folder, f"{part}-images-idx3-ubyte")
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte")
        parts.append(Images(pixels[:, None], labels))
    return Data(parts[0], parts[1], 10)


def read_idx(folder: Path, name: str) -> np.ndarray:
    """The array in an idx file of bytes, which starts with 0, 0, 8, its rank and its shape."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    if not plain.exists() and not zipped.exists():
        raise DataError(f"{plain} is missing: put MNIST's file {name} or {name}.gz there")
    raw = plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise DataError(f"{plain} is not an idx file of bytes: put MNIST's file there")
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def cifar10(folder: Path) -> Data:
    """CIFAR-10 from the six files of its binary version: a label, then 32x32 red, green, blue."""
    train = [read_cifar(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
    test = read_cifar(folder / "test_batch.bin")
    pixels, labels = (np.concatenate(part) for part in zip(*train))
    return Data(Images(pixels, labels), Images(*test), 10)


def read_cifar(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of one file."""
    if not path.exists():
        raise DataError(
            f"{path} is missing: put the files of CIFAR-10's binary version "
            "(cifar-10-binary.tar.gz, unpacked) into its folder"
        )
    rows = np.fromfile(str(path), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def recordio(path: Path) -> Data:
    """A RecordIO file and the index beside it; a fifth of its images are held out."""
    for needed in (path, path.with_suffix(".idx")):
        if path.suffix != ".rec" or not needed.is_file():
            raise DataError(
                f"{needed} is missing: --dataset recordio takes FILE.rec with "
                "FILE.idx beside it, both made by MXNet's tools/im2rec.py"
            )
    train, test = held_out(len(path.with_suffix(".idx").read_text().splitlines()))
    return Data(Records(str(path), train), Records(str(path), test), 0)


def batches_in_order(split_: Split, batch_size: int) -> List[np.ndarray]:
    """Indices of all images of a split, for evaluation; the last batch may be smaller."""
    return [
        np.arange(start, min(start + batch_size, len(split_)))
        for start in range(0, len(split_), batch_size)
    ]
