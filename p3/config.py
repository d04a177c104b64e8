"""Settings: read once from the environment, frozen, and the only reader of ``os.environ``.

Roles and addresses come from the ``DMLC_*`` variables that MXNet's launchers set; everything
of p3's own is named ``P3_*``.  Units are in the names: ``_s`` seconds, ``_bytes`` bytes,
``_elems`` elements of an array.  ``docs/settings.md`` is the table of these fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import logging
import os
from typing import Any, Callable, Dict, Mapping, MutableMapping, Optional, Tuple

from p3.errors import UsageError

_log = logging.getLogger("p3")

WORKER, SERVER, SCHEDULER, EMBEDDED = "worker", "server", "scheduler", "embedded"

#: `benchmarks/loopback.py`: a wide window was faster than a measured one, and slices of
#: 150,000 elements faster than of 50,000; urgency gains nothing where there is no link
_LOOPBACK_WINDOW_BYTES = 16 << 20
_LOOPBACK_SLICE_ELEMS = 200_000

#: (variables that give the number of tasks, what started them)
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OpenMPI"),
    ("PMI_SIZE", "an MPI launcher (PMI)"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one process of a job was told.  Immutable, so safe to share between threads."""

    role: str = EMBEDDED  #: DMLC_ROLE: worker, server or scheduler; embedded without one
    root_host: str = "127.0.0.1"  #: DMLC_PS_ROOT_URI: where the scheduler listens
    root_port: int = 0  #: DMLC_PS_ROOT_PORT: its port
    num_workers: int = 1  #: DMLC_NUM_WORKER
    num_servers: int = 1  #: DMLC_NUM_SERVER
    worker_id: Optional[int] = None  #: DMLC_WORKER_ID: this worker's rank; else by arrival
    node_host: Optional[str] = None  #: DMLC_NODE_HOST: the address that others reach us at
    interface: Optional[str] = None  #: DMLC_INTERFACE: or the network interface to use
    secret: Optional[bytes] = dataclasses.field(default=None, repr=False)  #: P3_SECRET(_FILE)
    encrypt: bool = False  #: P3_ENCRYPT: CURVE on data and credit too, not only on control
    slice_elems: int = 50_000  #: P3_SLICE_ELEMS: elements in a slice; more on loopback
    credit_bytes: int = 0  #: P3_CREDIT_BYTES: bytes in flight from a process; 0: measured
    observe_order: bool = True  #: P3_OBSERVE_ORDER: use the forward order that was observed
    start_timeout_s: float = 120.0  #: P3_START_TIMEOUT_S: to wait for all roles at the start
    heartbeat_timeout_s: float = 10.0  #: P3_HEARTBEAT_TIMEOUT_S: silence that means death
    stall_report_s: float = 60.0  #: P3_STALL_REPORT_S: waiting that is reported; 0: never
    round_timeout_s: float = 0.0  #: P3_ROUND_TIMEOUT_S: waiting that is an error; 0: never
    allow_optimizers: Tuple[str, ...] = ()  #: P3_ALLOW_OPTIMIZERS: modules of own optimizers
    replace_native: bool = False  #: P3_REPLACE_NATIVE: p3's stores under MXNet's names too
    launched: bool = False  #: P3_LAUNCHED: set by `p3 run`, native distributed stores refused

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_env(cls, env: Optional[Mapping[str, str]] = None) -> Settings:
        """Read the settings from ``env`` (default: the process's environment).

        Raises ``UsageError`` naming the variable if a value is missing or makes no sense,
        if another launcher's variables show several tasks but no role was given, and if a
        job that is not on loopback alone has no secret.
        """
        env = os.environ if env is None else env
        _warn_of_unknown(env)
        role = env.get("DMLC_ROLE", "").strip().lower()
        if not role:
            _refuse_lonely(env)
            return cls(**_own(env, "127.0.0.1"))
        if role not in (WORKER, SERVER, SCHEDULER):
            raise UsageError(f"DMLC_ROLE={role!r}: must be worker, server or scheduler")
        root_host = _need(env, "DMLC_PS_ROOT_URI")
        values = _own(env, root_host)
        values.update(
            role=role,
            root_host=root_host,
            root_port=_int(env, "DMLC_PS_ROOT_PORT"),
            num_workers=_int(env, "DMLC_NUM_WORKER"),
            num_servers=_int(env, "DMLC_NUM_SERVER"),
            node_host=env.get("DMLC_NODE_HOST") or None,
            interface=env.get("DMLC_INTERFACE") or None,
        )
        if role == WORKER and env.get("DMLC_WORKER_ID"):
            values["worker_id"] = _int(env, "DMLC_WORKER_ID")
        settings = cls(**values)
        _refuse_open(settings)
        return settings

    @property
    def window_bytes(self) -> int:
        """Bytes that may be in flight; 0: to be measured.

        On loopback the processors are the limit, not a link: urgency gains nothing there, and
        a process that waits for a core answers late, so the window is wide.
        """
        if self.credit_bytes or not (self.role == EMBEDDED or is_loopback(self.root_host)):
            return self.credit_bytes
        return _LOOPBACK_WINDOW_BYTES

    def agreed(self) -> Dict[str, Any]:
        """The settings that must be the same in every process of a job, as plain values."""
        names = ("num_workers", "num_servers", "slice_elems", "encrypt")
        return {name: getattr(self, name) for name in names}


_current: Optional[Settings] = None


def current() -> Settings:
    """This process's settings, read from the environment at the first call."""
    global _current
    if _current is None:
        _current = Settings.from_env()
    return _current


def adopt(settings: Settings) -> None:
    """Make ``settings`` this process's (``p3 run`` does, before it hides the role)."""
    global _current
    _current = settings


def hide_role(env: Optional[MutableMapping[str, str]] = None) -> None:
    """Take DMLC_ROLE out of the environment, so that MXNet's native store lets us be.

    What the process starts from here on is told by P3_LAUNCHED that p3's launcher was there.
    """
    env = os.environ if env is None else env
    env.pop("DMLC_ROLE", None)
    env["P3_LAUNCHED"] = "1"


def under_launcher() -> bool:
    """Whether p3's launcher started this process.  Raises nothing, whatever else is set."""
    if _current is not None:
        return _current.launched
    return os.environ.get("P3_LAUNCHED", "") not in ("", "0")


def replacing_native() -> bool:
    """Whether p3's stores take over the names of MXNet's distributed ones.  Raises nothing."""
    if _current is not None:
        return _current.replace_native
    return os.environ.get("P3_REPLACE_NATIVE", "") not in ("", "0")


def replace_native(yes: bool) -> None:
    """Have p3 take over the names of MXNet's distributed stores, or not; before MXNet is there."""
    os.environ["P3_REPLACE_NATIVE"] = "1" if yes else "0"


def environment() -> Dict[str, str]:
    """A copy of the process's environment, for the launcher to start others with."""
    return dict(os.environ)


def take_report_fd() -> Optional[int]:
    """The descriptor on which `p3 launch` wants to hear of a failure first; once, or None."""
    value = os.environ.pop("P3_REPORT_FD", "")
    return int(value) if value.isdigit() else None


def use_naive_engine() -> None:
    """Have MXNet, not yet imported, run each operation in the caller's thread."""
    os.environ["MXNET_ENGINE_TYPE"] = "NaiveEngine"


def naive_engine() -> bool:
    """Whether MXNet runs, or will run, each operation in the caller's thread."""
    return os.environ.get("MXNET_ENGINE_TYPE", "") == "NaiveEngine"


def _own(env: Mapping[str, str], root_host: str) -> Dict[str, Any]:
    """The P3_* variables that are set, as keyword arguments of Settings; loopback's defaults."""
    readers: Dict[str, Callable[[Mapping[str, str], str], Any]] = {
        "encrypt": _bool,
        "slice_elems": _int,
        "credit_bytes": _int,
        "observe_order": _bool,
        "start_timeout_s": _float,
        "heartbeat_timeout_s": _float,
        "stall_report_s": _float,
        "round_timeout_s": _float,
        "launched": _bool,
        "replace_native": _bool,
        "allow_optimizers": _names,
    }
    values = {
        field: read(env, "P3_" + field.upper())
        for field, read in readers.items()
        if env.get("P3_" + field.upper())
    }
    if is_loopback(root_host):
        values.setdefault("slice_elems", _LOOPBACK_SLICE_ELEMS)
    values["secret"] = _secret(env)
    return values


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    """Log the variables that look like settings of p3's and are none."""
    known = ["P3_" + field.name.upper() for field in dataclasses.fields(Settings)]
    known += ["P3_SECRET_FILE", "P3_REPORT_FD"]
    for name in env:
        if name.startswith("P3_") and not name.startswith("P3_TEST_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _log.warning("%s is no setting of p3's, so it changes nothing%s", name, hint)


def _secret(env: Mapping[str, str]) -> Optional[bytes]:
    if env.get("P3_SECRET"):
        return env["P3_SECRET"].encode()
    path = env.get("P3_SECRET_FILE")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        raise UsageError(f"P3_SECRET_FILE={path}: cannot be read ({error.strerror})") from None
    if not secret:
        raise UsageError(f"P3_SECRET_FILE={path}: the file is empty")
    return secret


def _refuse_lonely(env: Mapping[str, str]) -> None:
    """Raise if a launcher started several tasks that would each train alone."""
    for name, launcher in _LAUNCHERS:
        tasks = env.get(name, "")
        if tasks.isdigit() and int(tasks) > 1:
            raise UsageError(
                f"{launcher} started {tasks} tasks ({name}={tasks}), but this process has no"
                " role, so each task would train alone. Start every process as `p3 run SCRIPT ARGS`"
                " with DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and"
                " DMLC_NUM_SERVER set, or one machine's job by `p3 launch -n N SCRIPT ARGS`."
            )


def _refuse_open(settings: Settings) -> None:
    """Raise if a job that other hosts can reach has no secret to keep strangers out."""
    if settings.secret is None and not is_loopback(settings.root_host):
        raise UsageError(
            f"DMLC_PS_ROOT_URI={settings.root_host} is not loopback, and without a secret p3 talks"
            " on loopback only. Make one with `export P3_SECRET=$(openssl rand -hex 32)` and export"
            " the same value on every host of the job (or P3_SECRET_FILE, a file that holds it)."
        )


def is_loopback(host: str) -> bool:
    """Whether ``host``, an address or a name, stands for this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _need(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise UsageError(f"DMLC_ROLE={env['DMLC_ROLE']} is set but {name} is not; set it too")
    return value


def _int(env: Mapping[str, str], name: str) -> int:
    try:
        return int(_need(env, name) if name.startswith("DMLC_") else env[name])
    except ValueError:
        if not env.get(name):
            raise
        raise UsageError(f"{name}={env[name]!r}: must be a whole number") from None


def _float(env: Mapping[str, str], name: str) -> float:
    try:
        return float(env[name])
    except ValueError:
        raise UsageError(f"{name}={env[name]!r}: must be a number of seconds") from None


def _bool(env: Mapping[str, str], name: str) -> bool:
    value = env[name].strip().lower()
    if value not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise UsageError(f"{name}={env[name]!r}: must be 1 or 0")
    return value in ("1", "true", "yes", "on")


def _names(env: Mapping[str, str], name: str) -> Tuple[str, ...]:
    return tuple(part.strip() for part in env[name].split(",") if part.strip())


def _check(settings: Settings) -> None:
    """Raise ``UsageError`` for values that no job can run with."""
    rules = (
        ("DMLC_NUM_WORKER", settings.num_workers, settings.num_workers >= 1, "at least 1"),
        ("DMLC_NUM_SERVER", settings.num_servers, settings.num_servers >= 1, "at least 1"),
        ("DMLC_PS_ROOT_PORT", settings.root_port, 0 <= settings.root_port < 65536, "a port"),
        ("P3_SLICE_ELEMS", settings.slice_elems, settings.slice_elems >= 1, "at least 1"),
        ("P3_CREDIT_BYTES", settings.credit_bytes, settings.credit_bytes >= 0, "0 or more"),
        ("P3_START_TIMEOUT_S", settings.start_timeout_s, settings.start_timeout_s > 0, "over 0"),
        (
            "P3_HEARTBEAT_TIMEOUT_S",
            settings.heartbeat_timeout_s,
            settings.heartbeat_timeout_s > 0,
            "over 0",
        ),
        ("P3_STALL_REPORT_S", settings.stall_report_s, settings.stall_report_s >= 0, "0 or more"),
        (
            "P3_ROUND_TIMEOUT_S",
            settings.round_timeout_s,
            settings.round_timeout_s >= 0,
            "0 or more",
        ),
        (
            "DMLC_WORKER_ID",
            settings.worker_id,
            settings.worker_id is None or 0 <= settings.worker_id < settings.num_workers,
            f"from 0 to {settings.num_workers - 1}",
        ),
    )
    for name, value, good, rule in rules:
        if not good:
            raise UsageError(f"{name}={value}: must be {rule}")
