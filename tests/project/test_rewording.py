"""A sentence can be reworded: the pages that show it follow, and no other test pins its words."""

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

# pages that show sentences to their readers, and are to follow them
PAGES = {
    "tests/project/test_errors.py::test_the_page_has_every_sentence",
    "tests/project/test_docs.py::test_what_a_page_says_of_wrong_input_is_what_is_printed[own-text]",
}

# A word of prose. What a reader would copy, such as a key, an option, a path or a value, has other
# signs than small letters in it or beside it, or stands at an equals sign, and stays.
WORD = re.compile(r"(?<![^\s(;,])(?<!= )[a-z]{2,}(?![^\s);,:]| =)")

SAMPLED_FILES = 4
SEED = 38


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
    before = "{path}: no room ({reason!r}); give --folder, or set fp8.pad = true in run.toml"
    after = "{path}: NO ROOM ({reason!r}); GIVE --folder, OR SET fp8.pad = true IN run.toml"
    assert reworded(before) == after
    assert reworded("clip = {clip!r}: must be") == "clip = {clip!r}: MUST BE"


@pytest.mark.slow
def test_a_sample_of_all_files_pins_no_words(tmp_path: Path) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    sample = random.Random(SEED).sample(files, SAMPLED_FILES)
    assert failed_with_reworded_sentences(tmp_path, [*sample, *PAGES]) == PAGES


@pytest.mark.campaign
def test_only_pages_pin_words(tmp_path: Path) -> None:
    assert failed_with_reworded_sentences(tmp_path, ["tests"]) == PAGES
