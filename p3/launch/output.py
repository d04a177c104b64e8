"""Many processes' output on one terminal or in one log: whole lines, each with its role.

``Lines`` cuts what a process writes into lines and knows a progress bar's carriage returns;
it does no I/O.  ``Printer`` writes lines out.  Bytes all the way: nothing is decoded, so
nothing can fail to be.
"""

from __future__ import annotations

import os
import re
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Tuple

STDOUT, STDERR = 1, 2

#: A bar that is redrawn is shown this seldom where it cannot be redrawn, in a log file
BAR_INTERVAL_S = 10.0

_MAX_LINE_BYTES = 65536
_END = re.compile(rb"\r\n|\n|\r")
_CLEAR = b"\r\x1b[K"
_COLOURS = (32, 33, 34, 35, 36, 92, 93, 94, 95, 96)
_GREY = 90


class Line(NamedTuple):
    """One line without its end; ``redrawn`` if a carriage return was to overwrite it."""

    text: bytes
    redrawn: bool = False


class Lines:
    """Cuts the bytes of one stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> List[Line]:
        """Take the next bytes; return the lines that are complete now."""
        data = self._rest + data
        lines, start = [], 0
        for match in _END.finditer(data):
            if match.end() == len(data) and match.group() == b"\r":
                break  # a \n may follow, which makes it a plain end of line
            text = data[start : match.start()]
            start = match.end()
            if match.group() != b"\r":
                lines.append(Line(text))
            elif text.strip():
                lines.append(Line(text, redrawn=True))
        self._rest = data[start:]
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.extend(self.flush())
        return lines

    def flush(self) -> List[Line]:
        """The last line, if it has no end."""
        text, self._rest = self._rest.rstrip(b"\r"), b""
        return [Line(text)] if text else []


class Printer:
    """Writes the processes' lines to standard output and standard error.

    ``broken`` becomes true when nobody reads one of them any more; what would go there is
    dropped from then on.
    """

    def __init__(
        self,
        names: Iterable[str],
        colour: bool = True,
        clock: Callable[[], float] = time.monotonic,
        descriptors: Tuple[int, int] = (STDOUT, STDERR),
    ) -> None:
        self.broken = False
        self._clock = clock
        self._fds = {STDOUT: descriptors[0], STDERR: descriptors[1]}
        self._tty = {fd: os.isatty(fd) for fd in descriptors}
        self._names = list(names)
        self._width = max((len(name) for name in self._names), default=0)
        self._colour = colour
        self._bar_drawn = False  # a bar stands on the terminal's last line
        self._shown: Dict[Tuple[str, int], float] = {}

    def write(self, name: str, stream: int, line: Line) -> None:
        """Write one line of the process ``name`` to ``stream`` (STDOUT or STDERR)."""
        fd = self._fds[stream]
        if self._tty[fd]:
            self._write_tty(fd, name, line)
        elif not line.redrawn or self._due(name, stream):
            self._put(fd, self._prefix(name) + line.text + b"\n")

    def close(self) -> None:
        """End the line that a bar may stand on."""
        if self._bar_drawn:
            self._bar_drawn = False
            self._put(next(fd for fd, tty in self._tty.items() if tty), b"\n")

    def _write_tty(self, fd: int, name: str, line: Line) -> None:
        head = _CLEAR if self._bar_drawn or line.redrawn else b""
        prefix, text, end = self._prefix(name), line.text, b"\n"
        if self._colour:
            prefix = b"\x1b[%dm%s\x1b[0m" % (self._colour_of(name), prefix)
        if line.redrawn:
            columns = max(os.get_terminal_size(fd).columns - self._width - 4, 10)
            text, end = text.decode(errors="replace")[:columns].encode(), b""
        self._bar_drawn = line.redrawn
        self._put(fd, head + prefix + text + end)

    def _due(self, name: str, stream: int) -> bool:
        """Whether it is time to show a bar of this process again."""
        now, last = self._clock(), self._shown.get((name, stream))
        if last is not None and now - last < BAR_INTERVAL_S:
            return False
        self._shown[name, stream] = now
        return True

    def _prefix(self, name: str) -> bytes:
        return f"{name:<{self._width}} | ".encode()

    def _colour_of(self, name: str) -> int:
        workers = [other for other in self._names if other.startswith("worker")]
        return _COLOURS[workers.index(name) % len(_COLOURS)] if name in workers else _GREY

    def _put(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self.broken:
                view = view[os.write(fd, view) :]
        except OSError:
            self.broken = True
