"""Kills the processes of a job if its launcher is killed: the only thing that still can.

A script of its own, started by the launcher in a session of its own, which imports nothing
of p3.  On standard input it is told of process groups, ``+ID`` and ``-ID``, one a line; the
end of input means that the launcher is gone.
"""

import os
import signal
import sys


def main() -> None:
    """Follow the groups to the end of input, then kill those that are left."""
    groups = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # ended meanwhile


if __name__ == "__main__":
    main()
