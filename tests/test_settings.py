"""Settings as a user's shell gives them."""

from __future__ import annotations

import sys

import pytest
from commands import run

from p3.config import Settings


@pytest.mark.parametrize(
    ("name", "near"), [("P3_SLICE_ELEM", "P3_SLICE_ELEMS"), ("P3_SECRETFILE", "P3_SECRET_FILE")]
)
def test_a_misspelt_setting_is_logged_with_what_was_meant(name, near, caplog):
    Settings.from_env({name: "9"})
    assert name in caplog.text and f"did you mean {near}?" in caplog.text


def test_settings_that_there_are_and_other_programs_variables_are_not(caplog):
    ours = {"P3_SLICE_ELEMS": "9", "P3_SECRET": "x", "P3_TEST_OFFLINE": "1"}
    Settings.from_env({**ours, "PATH": "/"})
    assert not caplog.text


FAILING = """
import mxnet as mx
kv = mx.kv.create("dist_sync_p3")
kv.init("a", mx.nd.zeros((4,)))
kv.push("a", mx.nd.random.normal(0, -1, (4,)))
raise RuntimeError("the script's own reason")
"""


def test_a_failed_scripts_reason_is_the_last_thing_that_it_says(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    done = run([sys.executable, "-m", "p3", "run", "failing.py"], cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: the script's own reason" in done.stderr
    assert "Exception ignored" not in done.stderr
