"""A sentence can be reworded: the page of errors follows, and no other test pins its words."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from string import Formatter

import pytest

from megaprec.errors import SENTENCES, sentences

ROOT = Path(__file__).parents[2]
SNAPSHOT = "tests/project/test_errors.py::test_the_page_has_every_sentence"

# A word of prose. What a reader would copy, such as a key, an option, a path or a value, has other
# signs than small letters in it or beside it, and stays.
WORD = re.compile(r"(?<![^\s(;,])[a-z]{2,}(?![^\s);,:])")

SAMPLED_FILES = 12


def reworded(sentence: str) -> str:
    """Return the template of a sentence with each word of prose in capitals."""
    template = ""
    for literal, field, form, conversion in Formatter().parse(sentence):
        words = WORD.sub(lambda word: word[0].upper(), literal)
        template += words.replace("{", "{{").replace("}", "}}")
        if field is not None:
            converted = f"!{conversion}" if conversion else ""
            formatted = f":{form}" if form else ""
            template += f"{{{field}{converted}{formatted}}}"
    return template


def table() -> str:
    """Return messages.toml with all sentences reworded."""
    lines = []
    for area, by_name in sentences().items():
        lines.append(f"[{area}]")
        for name, sentence in by_name.items():
            lines.append(f"{name} = {json.dumps(reworded(sentence), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def failed_with_reworded_sentences(folder: Path, tests: list[str]) -> set[str]:
    """Run tests in a copy of the project whose sentences are reworded; return those that fail."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    (folder / SENTENCES.relative_to(ROOT)).write_text(table(), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert re.search(r"\d+ (passed|failed)", run.stdout), run.stdout + run.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE))


def files_with_errors() -> list[str]:
    """Return the files of tests in which errors are expected."""
    return sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"UserError|refusals|\.err\b|stderr", file.read_text(encoding="utf-8"))
        and file != Path(__file__)
    )


def test_words_are_reworded_and_what_a_user_would_copy_is_not() -> None:
    before = '{path}: no room ({reason!r}); give --folder, or set train.folder = "x" in run.toml'
    after = '{path}: NO ROOM ({reason!r}); GIVE --folder, OR SET train.folder = "x" IN run.toml'
    assert reworded(before) == after


@pytest.mark.slow
def test_of_a_sample_of_tests_only_the_page_of_errors_pins_words(tmp_path: Path) -> None:
    files = random.Random(38).sample(files_with_errors(), SAMPLED_FILES)
    assert failed_with_reworded_sentences(tmp_path, [*files, SNAPSHOT]) == {SNAPSHOT}


@pytest.mark.campaign
def test_only_the_page_of_errors_pins_words(tmp_path: Path) -> None:
    assert failed_with_reworded_sentences(tmp_path, ["tests"]) == {SNAPSHOT}
