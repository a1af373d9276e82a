"""Without the optional packages everything else works, and what needs one says in a line how to get
it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.modules_page import ROOT, modules
from tests.refusals import sentence

BLOCKED = (
    "tokenizers",
    "transformers",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "mlflow",
    "trackio",
    "wandb",
    "zstandard",
    "huggingface_hub",
    "PIL",
)
PROGRAM = f"""
import importlib, json, os, sys, traceback, warnings

warnings.simplefilter("error")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
modules, *jobs = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
from tools.cli import main
for folder, commands in jobs:
    os.chdir(folder)
    for command in commands:
        print("$", *command, file=sys.stderr, flush=True)
        print("exit code", main(command), file=sys.stderr, flush=True)
"""
Commands = list[list[object]]
SIZE = ["--vocab-size", 300]
WORK: Commands = [
    ["keys"],
    ["data", "build", "python", "tokens", "--vocab-size", 400, "--max-chars", 40_000],
    ["data", "inspect", "tokens"],
    ["data", "verify", "tokens"],
    ["data", "tokenizer", "python", "my.model", "--vocab-size", 400, "--max-chars", 40_000],
    ["train", "run.toml"],
    ["inspect", "run"],
    ["generate", "run", "--prompt", "def", "--tokens", 3],
    ["convert", "run", "megatron", "--to", "megatron"],
    ["diff", "run", "megatron"],
    ["schedule", "--kind", "1f1b", "--pipeline", 2, "--microbatches", 4, "-o", "x.svg"],
    ["precision", "show", "run.toml"],
]
PICTURE = ["schedule", "--kind", "1f1b", "--pipeline", 2, "--microbatches", 4, "-o", "x.png"]
NEEDS: list[tuple[list[object], str]] = [
    (
        ["data", "build", "x.parquet", "out", *SIZE],
        sentence("data.pyarrow_missing", file=re.compile(r"x\.parquet$")),
    ),
    (
        ["data", "build", "x.jsonl.zst", "out", *SIZE],
        sentence("data.pyarrow_missing", file=re.compile(r"x\.jsonl\.zst$")),
    ),
    (
        ["data", "build", "python", "out", "--tokenizer", "tokenizer.json"],
        sentence("data.tokenizers_missing", path="tokenizer.json"),
    ),
    (
        ["data", "tokenizer", "python", "my.json", *SIZE],
        sentence("data.tokenizers_missing", path="my.json"),
    ),
    (["train", "run.toml", 'log.to=["wandb"]'], sentence("journal.tracker_missing", name="wandb")),
    (PICTURE, sentence("plots.matplotlib_missing", path="x.png")),
]


def run(modules: list[str], *jobs: tuple[Path, Commands]) -> list[tuple[int, str]]:
    """Exit code and stderr of each command in its folder, all in one process in which the packages
    are not there."""
    given = [
        [str(folder), [[str(word) for word in command] for command in commands]]
        for folder, commands in jobs
    ]
    path = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(jobs[0][0]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", PROGRAM, json.dumps([modules, *given])]
    done = subprocess.run(
        words, cwd=jobs[0][0], env=path, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [part.rpartition("exit code ") for part in done.stderr.split("\n$ ")]
    answers = [(int(code.split()[0]), text) for text, _, code in said if code.strip()]
    assert len(answers) == sum(len(commands) for _, commands in jobs), done.stderr
    return answers


def prepare_work(folder: Path) -> None:
    (folder / "run.toml").write_text(
        '[model]\npreset = "llama-demo"\nlayers = 1\nhidden = 32\nheads = 2\nffn = 32\n'
        "[data]\nmax_chars = 40000\nvocab_size = 400\n"
        '[train]\nsteps = 2\nglobal_batch = 2\nmicro_batch = 1\nseq_length = 16\nfolder = "run"\n'
    )


def prepare_needs(folder: Path) -> None:
    for name in ("x.parquet", "x.jsonl.zst"):
        (folder / name).write_bytes(b"x")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (folder / "run.toml").write_text(
        '[model]\npreset = "llama-demo"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = '
        "1\nseq_length = 8\n"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of what works, and of what needs an extra."""
    work, needs = (tmp_path_factory.mktemp(name) for name in ("work", "needs"))
    prepare_work(work)
    prepare_needs(needs)
    return work, needs


@pytest.fixture(scope="module")
def answers(folders: tuple[Path, Path]) -> list[tuple[int, str]]:
    """Exit code and stderr of all commands, after all modules were imported."""
    names = [path.removesuffix(".py").replace("/", ".") for path in modules()]
    # programs, and a module of Triton's kernels, which is imported where Triton is there
    others = {
        "tools.bench.__main__",
        "tools.convert.core.untrusted",
        "models.feed_forward.grouped_sums",
    }
    work, needs = folders
    return run(
        [name for name in names if name not in others],
        (work, WORK),
        (needs, [command for command, _ in NEEDS]),
    )


@pytest.mark.slow
def test_all_modules_and_commands_work_without_the_extras(answers: list[tuple[int, str]]) -> None:
    for command, (code, said) in zip(WORK, answers, strict=False):
        assert code == 0, f"{command}: {said}"


@pytest.mark.slow
def test_what_needs_an_extra_names_it_in_one_line(
    answers: list[tuple[int, str]], folders: tuple[Path, Path]
) -> None:
    for (_, line), (code, said) in zip(NEEDS, answers[len(WORK) :], strict=True):
        *_, last = said.strip().splitlines()
        assert code == 2 and re.search(f"{line}$", last) and "Traceback" not in said, said
    assert {path.name for path in folders[1].iterdir()} == {
        "x.parquet",
        "x.jsonl.zst",
        "tokenizer.json",
        "metrics.jsonl",
        "run.toml",
    }


@pytest.mark.parametrize(
    "extra", ["data", "hf", "mlflow", "plots", "tensorboard", "trackio", "wandb"]
)
def test_every_extra_that_a_message_names_is_there(extra: str) -> None:
    assert f'"{extra}": ' in (ROOT / "setup.py").read_text()
