"""The ``p3`` command: ``p3 COMMAND ...``, also as ``python -m p3 COMMAND ...``.

A command is a module with ``main(argv) -> exit code``, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import List, NamedTuple, Optional

from p3 import __version__
from p3.errors import UsageError


class Command(NamedTuple):
    """One of p3's commands."""

    module: str
    help: str


COMMANDS = {
    "launch": Command("p3.launch.local", "start a job on this machine"),
    "run": Command("p3.launch.run", "run one process of a job, on any machine"),
}

_EXAMPLES = """\
examples:
  p3 launch -n 2 train.py --lr 0.1          2 workers and 2 servers on this machine
  p3 launch -n 2 -m mypackage.train         the same for a module
  p3 launch -n 2 --native train.py          with MXNet's own dist_sync, to compare
  p3 run train.py --lr 0.1                  the role from DMLC_ROLE; see p3 run --help

`p3 COMMAND --help` tells more about a command.
"""


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command that ``argv`` (default: the process's arguments) names."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        parser = _parser()
        parser.parse_args(argv)  # prints and exits on --help, --version and what is wrong
        parser.print_help()
        return 2
    command = COMMANDS[argv[0]]
    try:
        return int(importlib.import_module(command.module).main(argv[1:]))
    except UsageError as error:
        print(f"p3 {argv[0]}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="p3",
        usage="p3 [-h] [--version] COMMAND ...",
        description="Distributed training for MXNet with priority-based propagation.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"p3 {__version__}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
