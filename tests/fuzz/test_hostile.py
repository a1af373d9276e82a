"""What is read is bounded in bytes, members, depth and time: a file that promises more than it may
have is refused in one line, within the memory and the time that any command has."""

import json
import shutil
from pathlib import Path

import pytest

from tests.fuzz.hostile import HOSTILE, NESTED_PAGES, TEMPLATES, WEIGHTS
from tests.fuzz.server import Command, Server, faults

BUILD = ["new", "--tokenizer", "data/text.model", "--workers", "1"]


@pytest.mark.cases(2, sample=8)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_in_one_line(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    here = tmp_path / "room"
    (here / "data").mkdir(parents=True)
    shutil.copy(material / "data" / "text.model", here / "data")
    sources = HOSTILE[name](here)
    _require_refused(server, Command(["data", "build", *sources, *BUILD], str(here)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED_PAGES)
def test_pages_of_marks_in_each_other_end_plainly(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    here = tmp_path / "room"
    (here / "data").mkdir(parents=True)
    shutil.copy(material / "data" / "text.model", here / "data")
    sources = NESTED_PAGES[name](here)
    command = Command(["data", "build", *sources, *BUILD], str(here))
    assert faults(command, server.run(command)) == []


@pytest.mark.cases(1, sample=4)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_refused_in_one_line(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    here = tmp_path / "room"
    shutil.copytree(material / "hf", here / "hf")
    conversation = {"prompt": "a question", "completion": "an answer"}
    (here / "chats.jsonl").write_text(json.dumps(conversation))
    (here / "chats.jinja").write_text(TEMPLATES[name])
    chats = ["--chat-template", "chats.jinja", "--tokenizer", "hf/tokenizer.json"]
    _require_refused(server, Command(["data", "build", "chats.jsonl", "new", *chats], str(here)))


@pytest.mark.cases(1, sample=4)
@pytest.mark.parametrize("name", WEIGHTS)
def test_hostile_weights_are_refused_in_one_line(
    name: str, server: Server, material: Path, tmp_path: Path
) -> None:
    here = tmp_path / "room"
    shutil.copytree(material / "hf", here / "hf")
    (here / "hf" / "model.safetensors").write_bytes(WEIGHTS[name]())
    _require_refused(server, Command(["inspect", "hf", "--tensors"], str(here)))
    _require_refused(server, Command(["convert", "hf", "new", "--no-verify"], str(here)))


def _require_refused(server: Server, command: Command) -> None:
    ended = server.run(command)
    assert faults(command, ended) == []
    assert ended.code == 2
    lines = ended.err.strip().splitlines()
    of_progress = [line for line in lines if line.startswith("building ") or "tokens/s" in line]
    assert len(lines) - len(of_progress) == 1
