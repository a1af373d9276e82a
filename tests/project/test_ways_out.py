"""What a message tells a user to do exists: keys, values, commands, options and pages that the
code's texts name."""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

import parallel
from megaprec.errors import sentences
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tests.runs import steps, train_on, write_run
from tools.cli import parser_of_all
from tools.config.run_file import known_keys, read_run_settings, tables_of_a_run

ROOT = Path(__file__).parents[2]
ROOMS = ("megaprec", "parallel", "models", "tools")
OTHERS = (
    "megaprec/dialects",
    "tools/interop/foreign",
    "tools/interop/arguments",
    "tools/convert",
    "tools/interop/importing",
)
AREAS_OF_OTHERS = {
    "dialect": "megaprec/dialects",
    "precision_file": "tools/interop/foreign",
    "convert": "tools/convert",
    "import": "tools/interop/importing",
}
TABLES = "|".join(tables_of_a_run())
KEY = re.compile(rf"(?<![\w./\[\0-])({TABLES})\.([a-z_][a-z0-9_]*)")
VALUE = r'"[^"]*"|\[[^\]]*\]|\{[^}]*\}|[\w.+\-\0/]+'
SETTING = re.compile(rf"(?<![\w./\[{{])((?:{TABLES})\.[a-z_0-9]+) ?= ?({VALUE})")
COMMAND = re.compile(r"megaprec ([a-z][a-z-]*)((?: [^;:`\n]*)?)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
PAGE = re.compile(r"docs/[a-z0-9-]+\.md")
PLACES = {"N", "M", "VALUE", "FOLDER", "FILE", "PATH", "NAME"}  # stand for what the user has
FILES = {"json", "pt", "py", "safetensors", "toml"}
TORCHS = {"to_empty", "dequantize", "param_groups"}  # of modules and optimizers
NOT_COMMANDS = {  # words after megaprec's name in prose
    *("to", "features", "only", "megaprec", "wrote", "reads", "ran", "does", "and", "is", "has"),
}
OF_OTHERS = {
    *(
        "--nproc-per-node",
        "--nnodes",
        "--max-restarts",
        "--rdzv-conf",
        "--no-build-isolation",
    ),  # torchrun and pip
    *("--moe-grouped-gemm", "--num-layers", "--bf"),  # Megatron-LM, in examples
}
STYLES = "tools/analysis/report/page.py"  # has variables of CSS


@cache
def texts() -> tuple[tuple[str, int, str], ...]:
    """Return file, line and text of every string of the code that is no docstring; \\0 stands for
    what is filled in."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, int, str]]:
    for area, by_name in sentences().items():
        name = f"{AREAS_OF_OTHERS.get(area, 'megaprec')}/messages.toml [{area}]"
        for number, sentence in enumerate(by_name.values(), 1):
            yield name, number, re.sub(r"\{[^{}]+\}", "\0", sentence)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            tree = ast.parse(path.read_text())
            nodes = list(ast.walk(tree))
            aside = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    aside |= {id(part) for part in node.values}
            for node in nodes:
                if id(node) in aside:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield name, node.lineno, node.value
                elif isinstance(node, ast.JoinedStr):
                    parts = [
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    ]
                    yield name, node.lineno, "".join(parts)


def ours() -> Iterator[tuple[str, int, str]]:
    """Yield the texts that speak of our own keys and options alone."""
    return (text for text in texts() if not text[0].startswith(OTHERS))


def test_every_dotted_key_that_a_message_names_is_there() -> None:
    known = {*known_keys(), "model.preset"}
    missing = list[str]()
    for name, line, text in ours():
        for match in KEY.finditer(text):
            table, word = match.groups()
            of_library = (table == "optimizer" and hasattr(ParallelAMPOptimizer, word)) or (
                table == "parallel" and hasattr(parallel, word)
            )
            goes_on = text[match.end() : match.end() + 1] in ("\0", "(", "*")
            aside = word in FILES | TORCHS or of_library or goes_on
            if " " in text and f"{table}.{word}" not in known and not aside:
                missing.append(f"{name}, line {line}: {table}.{word}")
    assert not missing


def test_every_value_that_a_message_gives_to_a_key_is_accepted() -> None:
    tables = tables_of_a_run()
    tried = 0
    wrong = list[str]()
    for name, line, text in texts():
        for match in SETTING.finditer(text):
            key = match[1]
            value = match[2].rstrip(".")
            if (
                key not in known_keys()
                or not value
                or value in PLACES
                or "\0" in value
                or "..." in value
            ):
                continue
            if name == "tools/interop/foreign/whose.py":  # pairs of names, theirs and ours
                continue
            tried += 1
            table, _, field = key.partition(".")
            given, problems = read_run_settings(None, [f"{key}={value}"])
            try:
                tables[table].model_validate({field: given[key].value})
            except ValidationError as error:
                problems += [one["msg"] for one in error.errors() if one["loc"][:1] == (field,)]
            if problems:
                wrong.append(f"{name}, line {line}: {match[0]}: {problems}")
    assert not wrong and tried > 80


def _options(
    parser: argparse.ArgumentParser, commands: dict[str, set[str]], path: str = ""
) -> None:
    options = {option for action in parser._actions for option in action.option_strings}
    commands[path] = options
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                _options(inner, commands, f"{path} {name}".strip())


def test_every_command_and_option_that_a_message_names_is_there() -> None:
    commands = dict[str, set[str]]()
    _options(parser_of_all(), commands)
    every = set().union(*commands.values())
    wrong = list[str]()
    for name, line, text in texts():
        for match in COMMAND.finditer(text):
            word = match[1]
            inner = match[2].strip().partition(" ")[0]
            if (
                word in NOT_COMMANDS
                or " " not in text
                or text[match.end(1) : match.end(1) + 1] == "\0"
            ):
                continue
            path = f"{word} {inner}" if f"{word} {inner}" in commands else word
            told = set(OPTION.findall(match[2].partition(",")[0]))
            if path not in commands or (
                word != "import-args" and told - commands[path] - OF_OTHERS
            ):
                wrong.append(f"{name}, line {line}: megaprec {word}{match[2]}")
        if not name.startswith((*OTHERS, "tools/bench", STYLES)) and " " in text:
            strange = set(OPTION.findall(text)) - every - OF_OTHERS
            wrong += [f"{name}, line {line}: {option}" for option in sorted(strange)]
    assert not wrong


def test_every_page_that_a_message_names_is_there() -> None:
    named = {page for _, _, text in texts() for page in PAGE.findall(text)}
    assert len(named) > 5
    assert not [page for page in sorted(named) if not (ROOT / page).is_file()]


@pytest.mark.slow
def test_the_ramp_of_a_batch_by_parts_has_the_schedule_of_the_whole(tmp_path: Path) -> None:
    """Parts that are resumed with another train.global_batch, and one schedule in samples."""
    file = write_run(tmp_path)
    shared = [
        "lr.schedule=linear",
        "lr.warmup=0",
        "lr.peak=1e-3",
        "lr.final=0.0",
        "lr.unit=samples",
        "lr.length=32",
    ]
    train_on(file, *shared, "train.global_batch=2", "train.micro_batch=2", "train.steps=4")
    folder = train_on(
        file, *shared, "train.global_batch=4", "train.micro_batch=2", "train.steps=10"
    )
    rates = [record["lr"] for record in steps(folder)]
    before = [2 * step for step in range(4)] + [8 + 4 * step for step in range(6)]
    assert rates == pytest.approx([1e-3 * (1 - samples / 32) for samples in before], rel=1e-12)
