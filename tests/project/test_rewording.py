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

# files in which no test pins a word of a sentence; the others are still to follow
FREE_OF_WORDS = (
    "tests/checkpoint/test_ranges.py",
    "tests/commands/test_diagnose.py",
    "tests/convert/test_internevo.py",
    "tests/convert/test_names.py",
    "tests/data/test_originals.py",
    "tests/data/test_packed_files.py",
    "tests/data/test_samples.py",
    "tests/foreign/test_interpolations.py",
    "tests/foreign/test_traps.py",
    "tests/fuzz/test_parsing.py",
    "tests/importing/test_logs.py",
    "tests/models/test_context.py",
    "tests/models/test_dispatch.py",
    "tests/models/test_router.py",
    "tests/optim/test_scaler.py",
    "tests/optim/test_torch_api.py",
    "tests/parallel/test_marked.py",
    "tests/precision/test_plan.py",
    "tests/training/test_elastic.py",
    "tests/training/test_untrained_run.py",
)
SAMPLED_FILES = 4


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


def test_words_are_reworded_and_what_a_user_would_copy_is_not() -> None:
    before = '{path}: no room ({reason!r}); give --folder, or set train.folder = "x" in run.toml'
    after = '{path}: NO ROOM ({reason!r}); GIVE --folder, OR SET train.folder = "x" IN run.toml'
    assert reworded(before) == after


@pytest.mark.slow
def test_files_without_pinned_words_stay_without_them(tmp_path: Path) -> None:
    files = random.Random(38).sample(FREE_OF_WORDS, SAMPLED_FILES)
    assert failed_with_reworded_sentences(tmp_path, [*files, SNAPSHOT]) == {SNAPSHOT}


@pytest.mark.campaign
def test_only_the_page_of_errors_pins_words(tmp_path: Path) -> None:
    assert failed_with_reworded_sentences(tmp_path, ["tests"]) == {SNAPSHOT}
