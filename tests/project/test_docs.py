"""The pages of docs/: commands work in the order given, links lead somewhere, and the index knows every page.

A block marked `sh` is run here; one marked `console` needs what a test has not: a GPU, a cluster, hours.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.project.test_readme import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
LANGUAGES = {"prose", "", "sh", "console", "text", "toml", "python", "yaml"}
RUN = """
[model]
layers = 4
hidden = 32
heads = 4
vocab = 512
[data]
max_chars = 60_000
vocab_size = 500
[parallel]
pipeline = 2
[train]
steps = 2
global_batch = 4
micro_batch = 1
seq_length = 32
folder = "runs/mine"
"""
PREPARE_MODELS = """
import transformers
sizes = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, **sizes)).save_pretrained("meta-llama")
experts = transformers.MixtralConfig(vocab_size=96, num_local_experts=8, **sizes)
transformers.MixtralForCausalLM(experts).save_pretrained("mixtral")
"""


def parts(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block, in order; what stands between blocks has the language "prose"."""
    found, language = [("prose", "")], "prose"
    for line in page.read_text().splitlines(keepends=True):
        if line.startswith("```"):
            language = line[3:].strip() if language == "prose" else "prose"
            found.append((language, ""))
        else:
            found[-1] = (language, found[-1][1] + line)
    return found


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in parts(page) if name == language]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `megaprec` is the code of this checkout, and `python` the one that runs the tests."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "megaprec"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megaprec "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join(map(str, (command.parent, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_file(here: Path, environment: Mapping[str, str]) -> None:
    """What a page calls run.toml."""
    (here / "run.toml").write_text(RUN)


def models(here: Path, environment: Mapping[str, str]) -> None:
    """Two folders from the Hugging Face hub, and a run of ours."""
    run_file(here, environment)
    for command in ([sys.executable, "-c", PREPARE_MODELS], ["megaprec", "train", "run.toml"]):
        subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)


GIVEN: Mapping[str, Callable[[Path, Mapping[str, str]], None]] = {
    "converting.md": models,
    "fp8.md": run_file,
    "planning.md": run_file,
    "precision.md": run_file,
    "schedules.md": run_file,
    "serving.md": models,
}
"""What a page takes for granted; all others begin in an empty folder."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in DOCS if blocks(page, "sh")], ids=lambda page: page.name)
def test_every_command_of_a_page_works_in_the_order_given(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    here, shell = tmp_path / "here", shutil.which("bash")
    assert shell
    here.mkdir()
    GIVEN.get(page.name, lambda *_: None)(here, environment)
    for block in blocks(page, "sh"):
        done = subprocess.run(
            [shell, "-euo", "pipefail", "-c", block.replace("seq_length = 128", "seq_length = 32")],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or "cat >" in block, f"{block}\nsaid nothing"


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_block_says_whether_it_is_run(page: Path) -> None:
    assert {language for language, _ in parts(page)} <= LANGUAGES
    unmarked = re.compile(r"^ *(megaprec|torchrun|python|srun|make|pip) ", re.MULTILINE)
    indented = "".join(line for text in blocks(page, "prose") for line in text.splitlines(True) if line[:4] == "    ")
    assert not [text for text in (*blocks(page, ""), indented) if unmarked.search(text)], "mark these sh or console"


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_law_that_stands_for_a_feature_is_a_test_of_the_file_that_it_links_to() -> None:
    laws = re.findall(r"\[([a-z0-9 ]+)\]\(\.\./(tests/[\w/]+\.py)\)", (ROOT / "docs" / "precision.md").read_text())
    assert len(laws) > 40
    for law, file in laws:
        assert f"def test_{law.replace(' ', '_')}(" in (ROOT / file).read_text(), law


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS if page.name != "README.md")


def test_every_picture_of_the_docs_is_shown_somewhere() -> None:
    shown = "".join(page.read_text() for page in [*DOCS, ROOT / "README.md"])
    pictures = [file.name for file in (ROOT / "docs").iterdir() if file.suffix in (".png", ".svg")]
    assert [name for name in pictures if name not in shown] == []
