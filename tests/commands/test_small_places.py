"""A place that takes no file of the size that a command writes is told in plain lines, and nothing
there is taken for whole."""

import ast
import errno
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from megaprec.durable import OF_A_DISK
from tests.runs import train_on, write_run
from tools.training.ends import as_user_error

ROOT = Path(__file__).parents[2]
LIMITED = """
import resource, sys
from tools import cli
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(cli.main(sys.argv[1:]))
"""
WRITES = ("write_text", "write_bytes")
COMMANDS = {
    "hf": ["convert", "run", "written", "--no-verify"],
    "megatron": ["convert", "run", "written", "--to", "megatron", "--tp", "2"],
    "merge": ["merge", "run", "run", "-o", "written"],
    "report": ["report", "run", "-o", "written.html"],
    "schedule": ["schedule", "--pipeline=2", "--microbatches=4", "-o", "written.txt"],
    "data": ["data", "build", "text.txt", "written", "--vocab-size", "330", "--workers", "1"],
    "tokenizer": ["data", "tokenizer", "text.txt", "written.json", "--vocab-size", "330"],
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    train_on(write_run(folder), "train.steps=1", "log.plot=false")
    return folder


@pytest.mark.cases(2, sample=2)
@pytest.mark.parametrize("limit", [0, 100, 8_000, 40_000])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_may_not_be_so_large_is_told_in_plain_lines(
    command: str, limit: int, room: Path, forks: Path, tmp_path: Path
) -> None:
    words = [word.replace("written", str(tmp_path / "written")) for word in COMMANDS[command]]
    ended = limited(forks, limit, words, room)
    said = ended.stdout + ended.stderr
    assert ended.returncode in (0, 2) and "Traceback" not in said, said
    if ended.returncode:
        last = ended.stderr.splitlines()[-1]
        assert "arge" in last and ("raise the limit" in last or "choose another place" in last)
        visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        assert visible == [], "what is whole alone has its name"


def limited(
    forks: Path, limit: int, words: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """The command where no file may have more than `limit` bytes; pipes may."""
    return subprocess.run(
        [forks / "python", "-c", LIMITED, str(limit), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("number", OF_A_DISK)
def test_an_error_of_a_disk_is_told_whoever_wrote_the_file(number: int) -> None:
    told = as_user_error(OSError(number, "the reason"))
    assert str(told).startswith(f"a file: the reason ({errno.errorcode[number]}): ")


def test_every_file_that_is_written_whole_is_named_by_an_error() -> None:
    unnamed = list[str]()
    for package in ("megaprec", "parallel", "models", "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name == "megaprec/durable.py" or name.startswith("tools/bench/"):
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in WRITES:
                    unnamed.append(f"{name}:{node.lineno}: use put_text or put_bytes")
    assert unnamed == []
