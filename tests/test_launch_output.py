"""`p3 launch`: the output of many processes as that of one."""

from __future__ import annotations

import contextlib
import os

from p3.launch.output import STDERR, STDOUT, Line, Lines, Printer


def test_lines_are_cut_whole_whatever_the_pieces():
    data = b"one\ntwo\r\n\n10%\r20%\r\xff\x00\r\n   \rlast"
    expected = [
        Line(b"one"),
        Line(b"two"),
        Line(b""),
        Line(b"10%", redrawn=True),
        Line(b"20%", redrawn=True),
        Line(b"\xff\x00"),
        Line(b"last"),
    ]
    for size in range(1, len(data) + 1):
        lines = Lines()
        got = [
            line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])
        ]
        assert got + lines.flush() == expected and lines.flush() == []


def test_a_line_without_end_does_not_grow_for_ever():
    lines = Lines()
    got = [line for _ in range(64) for line in lines.feed(b"x" * 4096)] + lines.flush()
    assert b"".join(line.text for line in got) == b"x" * 64 * 4096
    assert max(len(line.text) for line in got) < 100_000


class Log:
    """A Printer that writes into a pipe (or, ``tty``, a terminal)."""

    def __init__(self, tty=False, colour=False):
        self.now = 0.0
        self.end, fd = os.openpty() if tty else os.pipe()
        names = ("p3", "worker 0", "worker 1")
        self.printer = Printer(names, colour, lambda: self.now, (fd, fd))
        self.fd = fd

    def text(self):
        os.close(self.fd)
        text = b""
        with contextlib.suppress(OSError):  # the end, for a terminal
            while not text.endswith(b"END"):
                data = os.read(self.end, 65536)
                if not data:
                    break
                text += data
        os.close(self.end)
        return text.replace(b"\r\n", b"\n")


def test_each_line_has_its_role_before_it():
    log = Log()
    log.printer.write("worker 0", STDOUT, Line(b"a\xff"))
    log.printer.write("p3", STDERR, Line(b""))
    assert log.text() == b"worker 0 | a\xff\np3       | \n"


def test_in_a_file_a_bar_is_shown_now_and_then_and_when_it_is_done():
    log = Log()
    for log.now in range(25):
        log.printer.write("worker 0", STDOUT, Line(b"%d" % log.now, redrawn=True))
    log.printer.write("worker 1", STDOUT, Line(b"other", redrawn=True))
    log.printer.write("worker 0", STDOUT, Line(b"done"))
    log.printer.close()
    lines = log.text().splitlines()
    assert [line.split(b"| ")[1] for line in lines] == [b"0", b"10", b"20", b"other", b"done"]


def test_on_a_terminal_a_bar_is_redrawn_and_makes_way():
    log = Log(tty=True)
    for percent in (1, 2):
        log.printer.write("worker 0", STDERR, Line(b"%d%%" % percent, redrawn=True))
    log.printer.write("worker 1", STDOUT, Line(b"text"))
    log.printer.write("worker 1", STDOUT, Line(b"more"))
    log.printer.write("worker 0", STDERR, Line(b"3%" + b"#" * 500, redrawn=True))
    log.printer.close()
    text = log.text()
    clear = b"\r\x1b[K"
    assert text.startswith(
        clear + b"worker 0 | 1%" + clear + b"worker 0 | 2%" + clear + b"worker 1 | text\n"
        b"worker 1 | more\n" + clear + b"worker 0 | 3%#"
    )
    assert text.endswith(b"#\n") and text.count(b"#") < 500  # one line of the terminal


def test_colours_are_for_terminals():
    for tty, colour in ((True, True), (True, False), (False, True)):
        log = Log(tty, colour)
        log.printer.write("worker 0", STDOUT, Line(b"x"))
        assert (b"\x1b[" in log.text()) == (tty and colour)


def test_a_reader_that_went_away_is_noticed():
    end, fd = os.pipe()
    os.close(end)
    printer = Printer(["worker 0"], descriptors=(fd, fd))
    printer.write("worker 0", STDOUT, Line(b"x"))
    assert printer.broken
    os.close(fd)
