"""Hosts joined by slow links, on one machine: network namespaces, veth pairs, one bridge.

    with NetLab(hosts=2, rate_bps=250e6) as lab:
        server = lab.hosts[0].run(["iperf3", "-s"])
        client = lab.hosts[1].run(["iperf3", "-c", lab.hosts[0].address])

Each host is a namespace with one link, `eth0`, to a bridge that lives in a namespace of its
own, so the machine's own network is never touched. Each direction of a link is limited by
`tc tbf` with a shallow queue, like a port of a switch. Nothing of a lab outlives it: leaving
the context, by an exception, SIGINT or SIGTERM too, ends the processes that `Host.run`
started (with their process groups) and deletes the namespaces. Namespaces carry the pid and
the start time of their owner, so what a killed run left is found, and removed, by the next lab.

Needs Linux, root with CAP_NET_ADMIN and CAP_SYS_ADMIN, `ip` and `tc`; `obstacle` finds out.
A lab belongs to the thread that entered it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

PREFIX = "p3lab"
_numbers = itertools.count()


class NetLabError(RuntimeError):
    """The machine does not let us build a lab; the message has the command and its output."""


class Host:
    """One host of a lab: `name` is its namespace, `address` its IPv4 address on `eth0`."""

    interface = "eth0"

    def __init__(self, name: str, address: str):
        self.name = name
        self.address = address
        self.processes: List[subprocess.Popen] = []

    def run(
        self, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, **options: Any
    ) -> subprocess.Popen:
        """Start a program on this host, in a process group of its own.

        `env` is added to this process's environment; `options` are Popen's. Never blocks.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *argv],
            env={**os.environ, **(env or {})},
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """End what `run` started and is still there, with all that it started in turn."""
        for process in self.processes:
            end_group(process)
        self.processes.clear()


class NetLab:
    """`hosts` hosts, each on a link of `rate_bps` bits a second in either direction.

    `delay_s` adds a one-way delay to each link's direction (it needs the kernel's netem, and
    a packet from host to host passes two links). Use as a context manager; raises
    NetLabError on entry if the machine cannot do it.
    """

    def __init__(self, hosts: int, rate_bps: float, delay_s: float = 0.0):
        if not 1 <= hosts <= 250:
            raise ValueError(f"a lab has 1 to 250 hosts, not {hosts}")
        if rate_bps < 1000:
            raise ValueError(f"rate_bps is bits a second, at least 1000, not {rate_bps}")
        self.rate_bps = int(rate_bps)
        self.delay_s = delay_s
        self.name = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self.bridge = f"{self.name}-br"
        self.hosts = [Host(f"{self.name}-h{i}", f"10.83.0.{i + 1}") for i in range(hosts)]
        self._handlers: Dict[int, Any] = {}

    def __enter__(self) -> NetLab:
        sweep()
        self._on_sigterm(_exit_on_signal)
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        previous = _ignore_signals()
        try:
            for host in self.hosts:
                host.stop()
            present = set(namespaces())
            for name in [*(host.name for host in self.hosts), self.bridge]:
                if name in present:
                    command("ip", "netns", "delete", name)
        finally:
            _restore_signals({**previous, **self._handlers})
            self._handlers = {}

    def _on_sigterm(self, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, handler)}

    def _build(self) -> None:
        command("ip", "netns", "add", self.bridge)
        command("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            self._plug(host, f"port{number}")

    def _plug(self, host: Host, port: str) -> None:
        """Make a host and its link."""
        ip_host = ("ip", "-n", host.name)
        ip_bridge = ("ip", "-n", self.bridge)
        command("ip", "netns", "add", host.name)
        command(
            *ip_bridge,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            host.interface,
            "netns",
            host.name,
        )
        command(*ip_bridge, "link", "set", port, "master", "br0")
        command(*ip_bridge, "link", "set", port, "up")
        command(*ip_host, "address", "add", f"{host.address}/24", "dev", host.interface)
        command(*ip_host, "link", "set", host.interface, "up")
        command(*ip_host, "link", "set", "lo", "up")
        self._limit(host.name, host.interface)
        self._limit(self.bridge, port)

    def _limit(self, namespace: str, device: str) -> None:
        """Limit what leaves `device`: at most 64 KB (or 4 ms) at once, 300 KB (or 4 ms) queued."""
        four_ms = int(self.rate_bps / 8 * 0.004)
        add = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
        parent = ("root",)
        if self.delay_s:
            command(
                *add,
                "root",
                "handle",
                "1:",
                "netem",
                "delay",
                f"{self.delay_s * 1e6:.0f}us",
                "limit",
                "100000",
            )
            parent = ("parent", "1:1")
        command(
            *add,
            *parent,
            "tbf",
            "rate",
            f"{self.rate_bps}bit",
            "burst",
            str(max(64_000, four_ms)),
            "limit",
            str(max(300_000, four_ms)),
        )


def command(*argv: str) -> str:
    """Run one command and return what it printed; NetLabError if it fails."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetLabError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        raise NetLabError(f"{' '.join(argv)}: {done.stdout.strip()}")
    return done.stdout


def namespaces() -> List[str]:
    """The names of all labs' namespaces on this machine."""
    names = (line.split()[0] for line in command("ip", "netns", "list").splitlines() if line)
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def obstacle() -> Optional[str]:
    """Why no lab can be built here, found by building one; None if it works."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"{' and '.join(missing)} not found (install iproute2)"
    if os.geteuid() != 0:
        return "not root"
    try:
        with NetLab(hosts=1, rate_bps=1e9) as lab:
            if lab.hosts[0].run(["true"]).wait(timeout=30):
                return "cannot run programs in a network namespace"
    except (NetLabError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def available() -> bool:
    """Whether labs can be built here."""
    return obstacle() is None


def sweep() -> None:
    """Remove the labs of processes that are gone, and end what still runs in them."""
    for name in namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
        if not match or _start_time(int(match.group(1))) == match.group(2):
            continue
        try:
            for pid in command("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            command("ip", "netns", "delete", name)
        except (NetLabError, ProcessLookupError):
            continue  # another lab sweeps at the same time


def end_group(process: subprocess.Popen, grace_s: float = 2.0) -> None:
    """End a process that leads its own group, and the group: politely, then for sure."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(10.0)


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; '' if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _ignore_signals() -> Dict[int, Any]:
    """Ignore SIGINT and SIGTERM, so that cleaning up is not cut short; returns what was set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }


def _restore_signals(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
