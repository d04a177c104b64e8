"""The same training three times: in one process, over p3 and over MXNet's dist_sync.

    python examples/demo.py        (or: make demo)

Two workers and two servers train a small VGG on handwritten digits. As root they live on two
hosts made of network namespaces, a worker and a server on each, joined by a link slow enough
that sending takes about as long as computing: the case that p3 is made for. Otherwise they
talk over loopback. The reference is one process with one cpu(i) context for each worker,
which sees the same images; all three start from the same weights, so they should end alike.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
# isort: off
import p3  # noqa: F401  lets MXNet import under newer numpy
import mxnet as mx

from benchmarks.netlab import NetLab, obstacle
from processes import RunError, job

SCRIPT = str(ROOT / "examples" / "image_classification.py")
WORKERS = SERVERS = 2
BATCH = 32  # images a worker and step
SETTINGS = ["--network", "cifar_vgg", "--dataset", "digits", "--lr", "0.01", "--epochs", "3"]
PORT = 9091  # the scheduler's, on a host of its own making


class Result(NamedTuple):
    """What one run left: its report, and the weights of each replica."""

    report: dict
    replicas: List[Dict[str, mx.nd.NDArray]]


def training(folder: Path, store: str, batch: int, contexts: int = 1) -> List[str]:
    """The command of one training process."""
    return [
        sys.executable,
        SCRIPT,
        *SETTINGS,
        "--kvstore",
        store,
        "--batch-size",
        str(batch),
        "--contexts",
        str(contexts),
        "--report",
        str(folder / "report"),
        "--save-params",
        str(folder / "weights-{replica}"),
    ]


def result(folder: Path) -> Result:
    """Read what a run left."""
    replicas = [mx.nd.load(str(folder / f"weights-{i}")) for i in range(WORKERS)]
    return Result(json.loads((folder / "report").read_text()), replicas)


def run_reference(folder: Path) -> Result:
    """One process, one context a worker."""
    with job(folder) as running:
        argv = training(folder, "device", BATCH * WORKERS, contexts=WORKERS)
        running.start("reference", argv, {})
        running.wait()
    return result(folder)


def run_loopback(folder: Path, store: str) -> Result:
    """All roles on this machine, by p3's launcher."""
    native = ["--native"] if store == "dist_sync" else []
    _, *argv = training(folder, store, BATCH)
    with job(folder) as running:
        running.start(
            "launcher",
            [
                sys.executable,
                "-m",
                "p3",
                "launch",
                *native,
                "-n",
                str(WORKERS),
                "-s",
                str(SERVERS),
                *argv,
            ],
            {},
        )
        running.wait()
    return result(folder)


def run_in_lab(folder: Path, store: str, rate_bps: float) -> Result:
    """A worker and a server on each host, the scheduler on the first one."""
    train = training(folder, store, BATCH)
    if store == "dist_sync":
        serve = [sys.executable, "-c", "import p3, mxnet"]  # MXNet serves while it is imported
    else:
        train[1:1] = ["-m", "p3", "run"]
        serve = train
    with NetLab(WORKERS, rate_bps) as lab, job(folder) as running:
        roles = [("scheduler", 0)] + [
            (role, i) for i in range(WORKERS) for role in ("server", "worker")
        ]
        for role, number in roles:
            host = lab.hosts[number]
            env = {
                "DMLC_ROLE": role,
                "DMLC_PS_ROOT_URI": lab.hosts[0].address,
                "DMLC_PS_ROOT_PORT": str(PORT),
                "DMLC_NUM_WORKER": str(WORKERS),
                "DMLC_NUM_SERVER": str(SERVERS),
                "DMLC_NODE_HOST": host.address,
                "DMLC_INTERFACE": host.interface,
            }
            if role == "worker":
                env["DMLC_WORKER_ID"] = str(number)
            running.start(f"{role}{number}", train if role == "worker" else serve, env, host)
        running.wait()
    return result(folder)


def balanced_rate(reference: Result) -> float:
    """The link's rate, bits a second, at which sending takes as long as computing.

    With as many servers as workers each host sends, in a step, its worker's gradients to the
    other hosts' servers and its server's weights to the other hosts' workers.
    """
    weights = sum(array.size * 4 for array in reference.replicas[0].values())
    sent = 2 * weights * (WORKERS - 1) / WORKERS
    step_s = BATCH * WORKERS / rate_of(reference)
    return float(f"{8 * sent / step_s:.2g}")


def rate_of(result: Result) -> float:
    """Images a second, start-up left out."""
    return float(result.report["images_per_s"])


def largest_difference(one: Result, other: Result) -> float:
    """The largest difference between any weight of rank r and the same one of context r."""
    return max(
        float((a[name] - b[name]).abs().max().asscalar())
        for a, b in zip(one.replicas, other.replicas)
        for name in a
    )


def table(results: Dict[str, Result]) -> str:
    """One line a run."""
    reference, *_ = results.values()
    lines = [
        f"{'store':<28}{'images/s':>10}{'final loss':>12}{'test accuracy':>15}"
        f"{'largest weight difference':>28}"
    ]
    for name, run in results.items():
        report = run.report
        lines.append(
            f"{name:<28}{report['images_per_s']:>10.1f}{report['test_loss']:>12.5f}"
            f"{report['test_accuracy']:>15.2%}{largest_difference(run, reference):>28.3g}"
        )
    return "\n".join(lines)


def environment() -> Dict[str, str]:
    """What all runs find in their environment: a secret made for them, and a thread each."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "P3_SECRET": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def run_all(folder: Path, reason: Optional[str]) -> Dict[str, Result]:
    """The three runs; `reason`: why there are no namespaces to run in, if so."""
    print("1 of 3: one process, a context for each worker", flush=True)
    results = {"one process": run_reference(folder / "reference")}
    rate = balanced_rate(results["one process"])
    where = "loopback" if reason else f"a link of {rate / 1e6:.0f} Mbit/s"
    for number, store in enumerate(("dist_sync_p3", "dist_sync"), 2):
        roles = f"{WORKERS} workers and {SERVERS} servers"
        print(f"{number} of 3: {store}, {roles} over {where}", flush=True)
        if reason:
            results[store] = run_loopback(folder / store, store)
        else:
            results[store] = run_in_lab(folder / store, store, rate)
    return results


def main() -> None:
    """Run all three and print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in [name for name in os.environ if name.startswith(("DMLC_", "P3_", "PS_"))]:
        del os.environ[name]  # of another job
    os.environ.update(environment())
    reason = obstacle()
    with tempfile.TemporaryDirectory(prefix="p3-demo-") as folder:
        results = run_all(Path(folder), reason)
    print(f"\n{table(results)}")
    if reason:
        print(f"Over loopback sending costs nothing, so p3 has nothing to gain ({reason}).")
    else:
        gain = rate_of(results["dist_sync_p3"]) / rate_of(results["dist_sync"])
        print(f"Over this link p3 trains {gain:.2f} times as fast as dist_sync.")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
