"""Which address others reach this process at: told, or looked up."""

from __future__ import annotations

import socket
import struct

from p3.config import Settings
from p3.errors import UsageError

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface (netdevice(7))


def root_address(settings: Settings) -> str:
    """The scheduler's address for ``connect``; raises ``UsageError`` if the host is unknown."""
    return f"tcp://{_resolve(settings.root_host)}:{settings.root_port}"


def own_host(settings: Settings) -> str:
    """The IP address to listen on and to advertise.

    DMLC_NODE_HOST if set, else the address of DMLC_INTERFACE, else that of the route to the
    scheduler.  Raises ``UsageError`` naming the setting if it cannot be found.
    """
    if settings.node_host:
        return _resolve(settings.node_host)
    if settings.interface:
        return _of_interface(settings.interface)
    root = _resolve(settings.root_host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((root, settings.root_port or 9))  # sends nothing: asks for the route
        except OSError as error:
            raise UsageError(
                f"no route to the scheduler at {settings.root_host}"
                f" (DMLC_PS_ROOT_URI): {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])


def _resolve(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"host {host!r} cannot be resolved ({error.strerror}); check DMLC_PS_ROOT_URI and"
            " DMLC_NODE_HOST"
        ) from None
    return str(found[0][4][0])


def _of_interface(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise UsageError(
                f"DMLC_INTERFACE={name}: {error.strerror}; this host has {known}"
            ) from None
        return socket.inet_ntoa(answer[20:24])
