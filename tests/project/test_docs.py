"""The pages of docs/: commands work in the order given, links lead somewhere, and the index knows
every page.

A block marked `sh` is run here; one marked `console` needs what a test has not: a GPU, a cluster,
hours.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from models.estimate.flops import training_flops
from tests.project.test_readme import ROOT
from tools.analysis.plots.shadow_plot import PICTURE
from tools.analysis.plots.training_plot import PLOT
from tools.cli import main
from tools.commands.doctor_layout import STEPS
from tools.commands.prove import FILE
from tools.config.run_file import load_run
from tools.console.units import flops

DOCS = sorted((ROOT / "docs").glob("*.md"))
DECISIONS = sorted((ROOT / "docs/design").glob("*.md"))
PROOFS = sorted((ROOT / "docs/proofs").glob("*.md"))
MEETING = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
]
LANGUAGES = {"prose", "", "sh", "console", "text", "toml", "python", "yaml"}
RUN = """
[model]
layers = 2
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


SHORTER = {
    "layers = 4": "layers = 2",
    "hidden = 128": "hidden = 32",
    "ffn = 384": "ffn = 96",
    "vocab_size = 2048": "vocab_size = 512",
    "seq_length = 128": "seq_length = 32",
    "global_batch = 16\nmicro_batch = 4": "global_batch = 4\nmicro_batch = 1",
    "megaprec init my_text\n": "megaprec init my_text\nsed -i -f smaller.sed run.toml\n",
    "train.steps=80": "train.steps=8",
    "steps = 40\n": "steps = 6\n",
    "warmup = 10": "warmup = 2",
    "eval_every = 20": "eval_every = 3",
    "every = 20\n": "every = 3\n",
    "train.steps=43": "train.steps=9",
    "step_00000040": "step_00000006",
    "step_00000043": "step_00000009",
    "--step 41": "--step 7",
    "train.steps=60 parallel.tensor=1": "train.steps=12 parallel.tensor=1",
    "log.timeline=50": "log.timeline=11",
    "--layouts tp=2 pp=2": "--layouts tp=2 pp=2 --steps 1",
    "tools.bench train train.n": "tools.bench train model.layers=1 model.hidden=64 train.seq_length=64 train.n",
}
"""What a page prints, and what is run in its place."""
SMALLER = (
    "s/^steps = .*/steps = 6/; s/^eval_every = .*/eval_every = 3/; s/^layers = .*/layers = 1/; "
    "s/^ffn = .*/ffn = 96/"
)
TEXT = 60_000  # characters that are read where a page reads more


def shorter(block: str) -> str:
    """The commands of a page on less text, with a smaller model and fewer steps, and without a
    picture of each run."""
    for printed, run in SHORTER.items():
        block = block.replace(printed, run)
    block = re.sub(r"megaprec train (\S+)(?!.*shadow)", r"megaprec train \1 log.plot=false", block)
    return re.sub(
        r"(max.chars[ =]+)([\d_]+)", lambda found: f"{found[1]}{min(TEXT, int(found[2]))}", block
    )


def parts(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block, in order; what stands between blocks has the language
    "prose"."""
    found = [("prose", "")]
    language = "prose"
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
def environment(forks: Path) -> dict[str, str]:
    """One in which `megaprec` and `python` are forked processes with the code of this checkout."""
    path = os.pathsep.join(map(str, (forks, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_file(here: Path, environment: Mapping[str, str]) -> None:
    """What a page calls run.toml."""
    (here / "run.toml").write_text(RUN)


def models(here: Path, environment: Mapping[str, str]) -> None:
    """Two folders from the Hugging Face hub, and a run of ours."""
    run_file(here, environment)
    for command in (["python", "-c", PREPARE_MODELS], ["megaprec", "train", "run.toml"]):
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


@pytest.mark.cases(0, sample=7)
@pytest.mark.parametrize(
    "page", [page for page in DOCS if blocks(page, "sh")], ids=lambda page: page.name
)
def test_every_command_of_a_page_works_in_the_order_given(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    here = tmp_path / "here"
    shell = shutil.which("bash")
    assert shell
    here.mkdir()
    (here / "smaller.sed").write_text(SMALLER)
    GIVEN.get(page.name, lambda *_: None)(here, environment)
    for block in blocks(page, "sh"):
        done = subprocess.run(
            [shell, "-euo", "pipefail", "-c", shorter(block)],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or "cat >" in block, f"{block}\nsaid nothing"


def test_what_is_run_in_place_of_something_stands_in_its_place_on_a_page() -> None:
    printed = "".join(text for page in DOCS for text in blocks(page, "sh"))
    assert not [text for text in SHORTER if text not in printed]


@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_block_says_whether_it_is_run(page: Path) -> None:
    assert {language for language, _ in parts(page)} <= LANGUAGES
    unmarked = re.compile(r"^ *(megaprec|torchrun|python|srun|make|pip) ", re.MULTILINE)
    indented = "".join(
        line
        for text in blocks(page, "prose")
        for line in text.splitlines(True)
        if line[:4] == "    "
    )
    assert not [text for text in (*blocks(page, ""), indented) if unmarked.search(text)], (
        "mark these sh or console"
    )


@pytest.mark.parametrize("page", [*DOCS, *DECISIONS, *PROOFS, *MEETING], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert anchor in slugs, target


@pytest.mark.parametrize("page", [*DOCS, *DECISIONS, *PROOFS, *MEETING], ids=lambda page: page.name)
def test_no_line_of_a_paragraph_is_taken_for_a_list(page: Path) -> None:
    """A line that begins with a plus or a dash ends its paragraph: lists follow an empty line."""
    lines = page.read_text().splitlines()
    opened = [token for token in MarkdownIt().parse("\n".join(lines)) if token.level == 0]
    lists = [token.map for token in opened if token.type.endswith("_list_open")]
    before = [lines[where[0] - 1] for where in lists if where and where[0]]
    assert not [line for line in before if line and not line.startswith("#")]


def test_every_law_that_stands_for_a_feature_is_a_test_of_the_file_that_it_links_to() -> None:
    laws = re.findall(
        r"\[([a-z0-9 ]+)\]\(\.\./(tests/[\w/]+\.py)\)", (ROOT / "docs" / "precision.md").read_text()
    )
    assert len(laws) > 40
    for law, file in laws:
        assert f"def test_{law.replace(' ', '_')}(" in (ROOT / file).read_text(), law


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(
        r"^\| \[[^]]+\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(page.name for page in DOCS if page.name != "README.md")


def test_the_index_of_decisions_lists_every_note_once() -> None:
    index = (ROOT / "docs/design/README.md").read_text()
    listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)
    assert sorted(listed) == sorted(note.name for note in DECISIONS if note.name != "README.md")


def test_every_picture_of_the_docs_is_shown_somewhere() -> None:
    shown = "".join(page.read_text() for page in [*DOCS, ROOT / "README.md"])
    pictures = [file.name for file in (ROOT / "docs").iterdir() if file.suffix in (".png", ".svg")]
    assert [name for name in pictures if name not in shown] == []


STEP = re.compile(
    r"step \d+/\d+  loss \S+  lr \S+  grad norm \S+  scale \S+  (?P<tokens>[\d,]+) tokens/s"
    r"  (?P<flops>[\d.]+ [KMGT]?FLOP)/s(  MFU \S+)?  ETA [\d:]+(  .*)?"
)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_lines_of_steps_have_the_parts_that_the_program_prints(page: Path) -> None:
    lines = [
        line
        for text in blocks(page, "text")
        for line in text.splitlines()
        if re.match(r"step +\d+/\d+ ", line)
    ]
    assert not [line for line in lines if not STEP.fullmatch(line)]


@pytest.mark.parametrize("name", ["tutorial.md", "glossary.md"])
def test_flops_of_the_tutorials_lines_are_those_of_its_model_at_their_speed(
    name: str, tmp_path: Path
) -> None:
    (script,) = (
        text
        for text in blocks(ROOT / "docs" / "tutorial.md", "sh")
        if text.startswith("cat > run.toml")
    )
    (tmp_path / "run.toml").write_text(script.partition("<<'END'\n")[2].partition("\nEND\n")[0])
    config = load_run(tmp_path / "run.toml")
    token = training_flops(config.sized_model, config.train.seq_length) / config.world_size
    found = [
        STEP.fullmatch(line)
        for text in blocks(ROOT / "docs" / name, "text")
        for line in text.splitlines()
    ]
    told = [(line["tokens"], line["flops"]) for line in found if line]
    assert len(told) > 1
    assert [said for _, said in told] == [
        flops(float(tokens.replace(",", "")) * token) for tokens, _ in told
    ]


def test_the_verdict_of_doctor_counts_the_checks_that_are_printed_above_it() -> None:
    (table,) = (
        text
        for text in blocks(ROOT / "docs" / "doctor.md", "text")
        if "verdict    all is well" in text
    )
    rows = [
        re.split(r" {2,}", line)[1]
        for line in table.splitlines()
        if re.search(r"  (ok|not tried)  ", line)
    ]
    assert f"{rows.count('ok')} checks ok, {rows.count('not tried')} not tried" in table


def test_the_page_of_doctor_says_how_many_steps_its_small_model_takes() -> None:
    found = re.findall(r"(\d+)\s+steps", (ROOT / "docs" / "doctor.md").read_text())
    assert set(found) == {str(STEPS)} and len(found) > 4


def test_every_page_has_the_same_order_of_ranks() -> None:
    orders = [
        " ".join(found.split())
        for page in DOCS
        for found in re.findall(r"rank = (\(\(?pp[^.]*)", page.read_text())
    ]
    assert orders == ["((pp · data + dp) · context + cp) · tensor + tp"] * 2


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("runs.md", "train run.toml train.stps=12 lr.warmup=-1"),
        ("own-text.md", "data verify mine.jsonl"),
    ],
    ids=["runs", "own-text"],
)
def test_what_a_page_says_of_wrong_input_is_what_is_printed(
    page: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "mine.jsonl").write_text('{"id": 1, "body": "The fox sleeps now."}\n')
    assert main(command.split()) == 2
    printed = "".join(capfd.readouterr())
    assert printed.splitlines() and printed in "".join(blocks(ROOT / "docs" / page, "text"))


def test_every_file_that_is_made_of_a_run_is_in_the_table_of_its_files() -> None:
    table = (
        (ROOT / "docs" / "runs.md")
        .read_text()
        .partition("## Files of a run")[2]
        .partition("\n## ")[0]
    )
    files = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert {PLOT, PICTURE, FILE, "parity.json", "parity.html"} <= set(
        re.findall(r"`([^`]+)`", "".join(files))
    )
