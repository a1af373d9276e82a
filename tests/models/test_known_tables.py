"""Tables of numbers hold those that were compared with their sources, to the last digit: models and
GPUs that others have published, the defaults of families, and defaults and limits of all keys."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

from models.config import ModelConfig
from models.estimate.gpus import GPUS
from models.presets import PRESETS, preset
from tools.config.run_file import RunConfig

# `python -m tests.models.test_known_tables` writes the files anew after a change that is meant.
HERE = Path(__file__).parent
TABLES = ("presets", "families", "gpus", "keys")

Rows = Mapping[str, Mapping[str, Any]]


def tables() -> dict[str, Rows]:
    """The rows of each table by name, as JSON reads them again."""
    smallest: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "hybrid_pattern": "*"}
    names = get_args(ModelConfig.model_fields["family"].annotation)
    families: dict[str, Rows] = {}
    for name in names:
        given = smallest if name == "nemotron_h" else {**smallest, "hybrid_pattern": ""}
        families[name] = ModelConfig(family=name, **given).model_dump()
    rows = {
        "presets": {name: preset(name).model_dump(exclude_unset=True) for name in PRESETS},
        "families": families,
        "gpus": {gpu.name: asdict(gpu) for gpu in GPUS},
        "keys": dict(limits_of(RunConfig.model_json_schema())),
    }
    return json.loads(json.dumps(rows))


def limits_of(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The defaults, limits and choices of all keys, without their help, by table and name."""
    return [
        (f"{table}.{key}", without_help(said))
        for table, definition in schema["$defs"].items()
        for key, said in definition["properties"].items()
    ]


def without_help(said: Any) -> Any:
    if isinstance(said, list):
        return [without_help(each) for each in said]
    if not isinstance(said, dict):
        return said
    left_out = ("description", "title")
    return {key: without_help(value) for key, value in said.items() if key not in left_out}


def file_of(table: str) -> Path:
    return HERE / f"known_{table}.jsonl"


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_exactly_the_numbers_that_were_compared(table: str) -> None:
    known = dict(map(json.loads, file_of(table).read_text().splitlines()))
    assert tables()[table] == known


if __name__ == "__main__":
    for table, rows in tables().items():
        lines = [json.dumps(row) for row in rows.items()]
        file_of(table).write_text("\n".join(lines) + "\n")
