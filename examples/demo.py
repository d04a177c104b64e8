"""The same training three times: in one process, over p3 and over MXNet's dist_sync.

    python examples/demo.py        (or: make demo)

Two workers and two servers train a small VGG on handwritten digits. As root they live on two
hosts made of network namespaces, a worker and a server on each, joined by a link slow enough
that sending takes about as long as computing: the case that p3 is made for. Otherwise they
talk over loopback. The reference is one process with one cpu(i) context for each worker,
which sees the same images; all three start from the same weights, so they should end alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Dict, Iterator, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
# isort: off
import p3  # noqa: F401  lets MXNet import under newer numpy
import mxnet as mx

from benchmarks.netlab import Host, NetLab, end_group, obstacle

SCRIPT = str(ROOT / "examples" / "image_classification.py")
WORKERS = SERVERS = 2
BATCH = 32  # images a worker and step
SETTINGS = ["--network", "cifar_vgg", "--dataset", "digits", "--lr", "0.01", "--epochs", "4"]
LIMIT_S = 150  # a run that takes longer has failed
PORT = 9091  # the scheduler's, on a host of its own making


class DemoError(Exception):
    """A run failed; the message has the end of its log."""


class Result(NamedTuple):
    """What one run left: its report, and the weights of each replica."""

    report: dict
    replicas: List[Dict[str, mx.nd.NDArray]]


class Job:
    """The processes of one run, each with a log in `folder`, ended when the job is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: Dict[str, Popen] = {}
        self.shown: Dict[str, int] = {}

    def start(
        self, name: str, argv: List[str], env: Dict[str, str], host: Optional[Host] = None
    ) -> None:
        """Start a process, on a host of a lab or right here."""
        log = self.log(name).open("wb")
        with log:
            if host:
                process = host.run(argv, env, stdout=log, stderr=STDOUT)
            else:
                process = Popen(
                    argv,
                    env={**os.environ, **env},
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                )
        self.processes[name] = process

    def log(self, name: str) -> Path:
        """Where a process's output goes."""
        return self.folder / f"{name}.log"

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Show the workers' output until all processes have ended; DemoError if one fails."""
        deadline = time.monotonic() + limit_s
        running = dict(self.processes)
        while running:
            for name, process in list(running.items()):
                code = process.poll()
                self.show(name)
                if code:
                    raise DemoError(f"{name} ended with code {code}:\n{self.tail(name)}")
                if code == 0:
                    del running[name]
            if running and time.monotonic() > deadline:
                tails = "\n".join(f"{name}:\n{self.tail(name)}" for name in running)
                raise DemoError(f"still running after {limit_s} s:\n{tails}")
            time.sleep(0.1)

    def show(self, name: str) -> None:
        """Print a worker's new lines."""
        if name.startswith(("scheduler", "server")):
            return
        with self.log(name).open(errors="replace") as log:
            log.seek(self.shown.get(name, 0))
            for line in iter(log.readline, ""):
                if not line.endswith("\n"):
                    break
                print(f"    {line}", end="", flush=True)
                self.shown[name] = log.tell()

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a log."""
        text = self.log(name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"    {line}" for line in text) or "    (it printed nothing)"


@contextlib.contextmanager
def job(folder: Path) -> Iterator[Job]:
    """A Job whose processes are gone afterwards."""
    folder.mkdir()
    made = Job(folder)
    try:
        yield made
    finally:
        for process in made.processes.values():
            end_group(process)


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
        train[1:1] = serve = ["-m", "p3", "run"]
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
    step_s = BATCH * WORKERS / reference.report["images_per_s"]
    return float(f"{8 * sent / step_s:.2g}")


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


def main() -> None:
    """Run all three and print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in [name for name in os.environ if name.startswith(("DMLC_", "P3_", "PS_"))]:
        del os.environ[name]  # of another job
    os.environ.update(
        P3_SECRET=secrets.token_hex(32),
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )
    reason = obstacle()
    results = {}
    with tempfile.TemporaryDirectory(prefix="p3-demo-") as name:
        folder = Path(name)
        print("1 of 3: one process, a context for each worker", flush=True)
        results["one process"] = reference = run_reference(folder / "reference")
        rate = balanced_rate(reference)
        for number, store in enumerate(("dist_sync_p3", "dist_sync"), 2):
            where = "loopback" if reason else f"a link of {rate / 1e6:.0f} Mbit/s"
            print(
                f"{number} of 3: {store}, {WORKERS} workers and {SERVERS} servers over {where}",
                flush=True,
            )
            run = folder / store
            results[store] = run_loopback(run, store) if reason else run_in_lab(run, store, rate)
    print("\n" + table(results))
    if reason:
        print(f"Over loopback sending costs nothing, so p3 has nothing to gain ({reason}).")


if __name__ == "__main__":
    try:
        main()
    except DemoError as error:
        sys.exit(f"demo: {error}")
