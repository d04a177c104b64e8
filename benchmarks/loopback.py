"""Rounds of pushpull on this machine, p3 beside MXNet's own dist_sync, in one run.

    python benchmarks/loopback.py [--repeat 5]

No compute and no limit on the network: what is measured is the cost of the stores
themselves.  The two take turns, so that a machine that gets slower slows both; the ratio is
taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
POINTS = [
    # workers, servers, keys, rounds
    (1, 1, "16x1000000", 20),
    (4, 4, "resnet50_v1", 5),
    (1, 1, "500x10", 50),
]


def measure(native: bool, workers: int, servers: int, keys: str, rounds: int) -> dict:
    """One job: ``{"seconds": [...], "bytes": ...}``."""
    launch = [sys.executable, "-m", "p3", "launch", "-n", str(workers), "-s", str(servers)]
    script = [str(HERE / "rounds.py"), "--keys", keys, "--rounds", str(rounds)]
    store = ["--kvstore", "dist_sync" if native else "dist_sync_p3"]
    command = launch + (["--native"] if native else []) + script + store
    done = subprocess.run(command, capture_output=True, timeout=600, check=False)
    output = done.stdout.decode()
    if done.returncode != 0 or "{" not in output:
        sys.exit(f"{' '.join(command)}\n{output}{done.stderr.decode()}")
    line = next(line for line in output.splitlines() if "{" in line)
    return json.loads(line[line.index("{") :])


def spread(values: list, unit: str = "") -> str:
    """``median (least to most)``."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure every point and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="jobs of each store a point")
    parser.add_argument("--only", help="the keys of the one point to measure")
    args = parser.parse_args()
    for workers, servers, keys, rounds in POINTS:
        if args.only not in (None, keys):
            continue
        times: dict = {False: [], True: []}
        for _ in range(args.repeat):
            for native in (False, True):
                result = measure(native, workers, servers, keys, rounds)
                times[native].append(1e3 * statistics.median(result["seconds"]))
        ratios = [theirs / ours for ours, theirs in zip(times[False], times[True])]
        print(
            f"{workers} workers, {servers} servers, {keys} ({result['bytes'] / 1e6:.1f} MB):"
            f" p3 {spread(times[False], ' ms')}, dist_sync {spread(times[True], ' ms')},"
            f" p3 is {spread(ratios)} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
