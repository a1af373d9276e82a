"""Without the optional packages everything else works, and what needs one says in a line how to get it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_readme import ROOT, listed

BLOCKED = (
    "tokenizers",
    "transformers",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "wandb",
    "zstandard",
    "huggingface_hub",
    "PIL",
)
PROGRAM = f"""
import importlib, json, sys, traceback, warnings

warnings.simplefilter("error")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
modules, commands = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
from tools.cli import main
for command in commands:
    print("$", *command, file=sys.stderr, flush=True)
    print("exit code", main(command), file=sys.stderr, flush=True)
"""


def run(folder: Path, modules: list[str], commands: list[list[object]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each command, all in one process in which the packages are not there."""
    words = json.dumps([modules, [[str(word) for word in command] for command in commands]])
    path = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=folder, env=path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [part.rpartition("exit code ") for part in done.stderr.split("\n$ ")]
    answers = [(int(code.split()[0]), text) for text, _, code in said if code.strip()]
    assert len(answers) == len(commands), done.stderr
    return answers


def test_all_modules_and_commands_work_without_the_extras(tmp_path: Path) -> None:
    modules = [path.removesuffix(".py").replace("/", ".") for path in listed()]
    own = {"tools.bench.__main__", "tools.convert.core.untrusted"}  # programs
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "llama-demo"\nlayers = 1\nhidden = 32\nheads = 2\nffn = 32\n'
        "[data]\nmax_chars = 40000\nvocab_size = 400\n"
        '[train]\nsteps = 2\nglobal_batch = 2\nmicro_batch = 1\nseq_length = 16\nfolder = "run"\n'
    )
    commands: list[list[object]] = [
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
    answers = run(tmp_path, [module for module in modules if module not in own], commands)
    for command, (code, said) in zip(commands, answers, strict=True):
        assert code == 0, f"{command}: {said}"


def test_what_needs_an_extra_names_it_in_one_line(tmp_path: Path) -> None:
    for name in ("x.parquet", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "llama-demo"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nseq_length = 8\n'
    )
    size = ["--vocab-size", 300]
    picture = ["schedule", "--kind", "1f1b", "--pipeline", 2, "--microbatches", 4, "-o", "x.png"]
    needs: list[tuple[list[object], str]] = [
        (["data", "build", "x.parquet", "out", *size], "x.parquet needs pyarrow: pip install pyarrow"),
        (["data", "build", "x.jsonl.zst", "out", *size], "needs pyarrow: pip install pyarrow"),
        (["data", "build", "python", "out", "--tokenizer", "tokenizer.json"], "pip install tokenizers"),
        (["data", "tokenizer", "python", "my.json", *size], "needs tokenizers: pip install tokenizers"),
        (["train", "run.toml", 'log.to=["wandb"]'], 'log.to = "wandb" needs wandb: pip install wandb'),
        (picture, "PNG needs matplotlib: pip install matplotlib, or write .svg"),
    ]
    for (_, line), (code, said) in zip(needs, run(tmp_path, [], [c for c, _ in needs]), strict=True):
        *_, last = said.strip().splitlines()
        assert code == 2 and last.endswith(line) and "Traceback" not in said, said
    assert {path.name for path in tmp_path.iterdir()} == {
        "x.parquet",
        "x.jsonl.zst",
        "tokenizer.json",
        "metrics.jsonl",
        "run.toml",
    }


@pytest.mark.parametrize("extra", ["data", "hf", "plots", "tensorboard", "wandb"])
def test_every_extra_that_a_message_names_is_there(extra: str) -> None:
    assert f'"{extra}": ' in (ROOT / "setup.py").read_text()
