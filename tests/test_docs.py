"""The documents say what the code does: settings, commands, files."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import p3
from p3.config import Settings

ROOT = pathlib.Path(__file__).parent.parent
#: fields whose variable is not P3_ and the field's name in capitals
VARIABLES = {
    "role": "DMLC_ROLE",
    "root_host": "DMLC_PS_ROOT_URI",
    "root_port": "DMLC_PS_ROOT_PORT",
    "num_workers": "DMLC_NUM_WORKER",
    "num_servers": "DMLC_NUM_SERVER",
    "worker_id": "DMLC_WORKER_ID",
    "node_host": "DMLC_NODE_HOST",
    "interface": "DMLC_INTERFACE",
}


def rows() -> dict[str, list[str]]:
    """The settings table: variable -> its row's cells."""
    table = {}
    for line in (ROOT / "docs/settings.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            table[cells[0].strip("`")] = cells
    return table


def test_the_settings_table_has_every_field_and_no_other() -> None:
    fields = {f.name: VARIABLES.get(f.name, "P3_" + f.name.upper()) for f in _fields()}
    assert set(rows()) == set(fields.values())


def test_the_settings_table_has_the_true_defaults() -> None:
    for field in _fields():
        default, cell = field.default, rows()[_variable(field.name)][1]
        if field.name in ("root_host", "root_port", "num_workers", "num_servers"):
            assert cell == "needed with a role", field.name
        elif isinstance(default, bool):
            assert cell == str(int(default)), field.name
        elif isinstance(default, (int, float)):
            assert float(cell) == default, field.name


def test_the_settings_table_tells_what_must_agree() -> None:
    agreed = {_variable(name) for name in Settings().agreed()} | {"P3_SECRET"}
    assert {variable for variable, cells in rows().items() if cells[3] == "yes"} == agreed


def test_the_map_names_every_file_of_the_package() -> None:
    text = p3.__doc__ or ""
    for path in (ROOT / "p3").glob("*.py"):
        assert path.name in text or path.name == "__init__.py", path.name
    for path in (ROOT / "p3").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"{path.name}/" in text, path.name


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def _fields() -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(Settings)


def _variable(name: str) -> str:
    return VARIABLES.get(name, "P3_" + name.upper())
