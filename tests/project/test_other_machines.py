"""Machines that lack what Linux has, and environments and files that no machine can serve."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rich.table import Table

from megaprec.comm.gloo_threads import waiting_their_turn
from megaprec.diagnose.call_stack import main_calls
from megaprec.diagnose.position import Phase, Position
from megaprec.errors import Problem, UserError
from megaprec.parsing import MOST_SETTINGS, parse_toml
from megaprec.resources import (
    cores,
    most_processes,
    peak_memory,
    require_threads,
)
from parallel.hangs.heartbeat import Beat, machine_id, newest
from tests.refusals import raises, sentence
from tests.runs import write_run
from tools import cli
from tools.console.tables import PIPE_COLUMNS, print_table
from tools.convert.core.tensors import allocate

ROOT = Path(__file__).parents[2]

# What a command finds on macOS: as far as Python can take it away on Linux. torch is imported
# before.
AS_ON_MACOS = """
import builtins, io, os, pathlib, sys, sysconfig
sysconfig.get_config_vars()  # read while the platform is the real one
import torch

for name in ("posix_fallocate", "sched_getaffinity", "sched_getscheduler", "sched_setscheduler", "memfd_create"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "darwin"

def hiding(function):
    def without_proc(path, *rest, **more):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *rest, **more)
    return without_proc

io.open = builtins.open = hiding(open)
for name in ("listdir", "scandir", "readlink", "open"):
    setattr(os, name, hiding(getattr(os, name)))

from tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_trains_resumes_and_exports_without_what_only_linux_has(tmp_path: Path) -> None:
    run_file = write_run(tmp_path)
    commands = [
        ["train", str(run_file), "train.steps=2"],
        ["train", str(run_file), "train.steps=4"],
        ["inspect", str(tmp_path / "run")],
        # transformers itself looks at the system
        ["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", "--no-verify"],
    ]
    for command in commands:
        words = [sys.executable, "-c", AS_ON_MACOS, *command]
        keys = [f"train.folder={tmp_path / 'run'}"] if command[0] == "train" else []
        done = subprocess.run(
            [*words, *keys], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_room_is_found_for_a_file_where_nothing_can_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    def take_away() -> None:
        monkeypatch.delattr(os, "posix_fallocate")

    ways: list[Callable[[], None]] = [
        lambda: monkeypatch.setattr(os, "posix_fallocate", refuses),
        take_away,
    ]
    for number, way in enumerate(ways):
        way()
        with (tmp_path / str(number)).open("wb") as file:
            allocate(file.fileno(), 12345)
            assert os.fstat(file.fileno()).st_size == 12345
            with pytest.raises(OSError, match="No space left"):
                allocate(file.fileno(), 1 << 60)


def test_a_process_that_is_full_is_told_so_where_room_can_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError, match="No space left"):
        allocate(file.fileno(), 1)


def test_the_peak_of_memory_is_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_memory() > kibibytes * 256
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory() < kibibytes * 512


@pytest.mark.slow
def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    child = "from megaprec.resources import peak_memory; print(peak_memory())"
    large = bytearray(os.urandom(1)) * 2**28
    answer = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True)
    assert int(answer.stdout) < len(large)


def test_threads_cores_and_positions_need_no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_getscheduler", "sched_setscheduler", "sched_getaffinity", "memfd_create"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cores(Path("/no/such/system")) >= 1
    with waiting_their_turn():
        pass
    position = Position()
    position.share()
    position.enter(Phase.STEP, 1)
    beat = Beat.of(0, 1, position, main_calls())
    assert newest(beat).step == 1
    assert beat.at, "read from a temporary file"
    assert machine_id()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
@pytest.mark.parametrize("value", ["0", "-1", "99999999", "many", "1.5", "0x4", "9" * 5000, "²"])
def test_a_number_of_threads_that_cannot_be_is_refused_before_a_library_takes_it(
    name: str, value: str
) -> None:
    with pytest.raises(UserError, match=sentence("megaprec.thread_count", name=name)):
        require_threads({name: value})


def test_numbers_of_threads_that_can_be_are_taken() -> None:
    require_threads({})
    require_threads({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "1"})
    require_threads({"OMP_NUM_THREADS": f" {most_processes()} , 1"})
    with raises("megaprec.thread_count", name="MKL_NUM_THREADS"):
        require_threads({"MKL_NUM_THREADS": "2,1"})


def test_every_command_says_in_one_line_which_variable_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert cli.main(["keys"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


DEEP = "a" + ".a" * 20_000


@pytest.mark.parametrize(
    "text", [f"{DEEP} = 1", f"[{DEEP}]", f"b = {{{DEEP} = 1}}", "'a' . \"a\"." * 200 + "a = 1"]
)
def test_a_key_of_very_many_parts_is_refused_at_once(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match="a key of more than 100 parts"):
        parse_toml(text)
    assert time.process_time() - begun < 60


@pytest.mark.parametrize(
    "text",
    ["[" + "x" * 500_000 + "]", "a" + " " * 500_000 + "= 1", '"' * 500_000, "a.b " * 100_000],
)
def test_a_long_line_is_read_in_time_that_grows_with_its_length(text: str) -> None:
    begin = time.process_time()
    with suppress(ValueError):
        parse_toml(text)
    assert time.process_time() - begin < 60, "a search begins at each character again"


def test_keys_and_texts_of_usual_length_are_read() -> None:
    key = ".".join("abc")
    text = (
        f'{key} = "{"x." * 30}"\n[t]\n"a.b" = 1.5\nlist = '
        f"[{', '.join('1.0' for _ in range(500))}]\n"
    )
    parsed = parse_toml(text)
    assert parsed["a"]["b"]["c"].startswith("x.x.")
    assert parsed["t"]["a.b"] == 1.5


def test_a_run_file_of_a_million_keys_is_refused_by_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "many.toml"
    file.write_text("".join(f"k{number} = 1\n" for number in range(MOST_SETTINGS // 8)))
    begun = time.process_time()
    assert cli.main(["train", str(file)]) == 2
    assert time.process_time() - begun < 60
    larger = f"it is larger than {MOST_SETTINGS:,} bytes"
    assert (
        capsys.readouterr().err
        == f"{Problem.of('config.run_file_unreadable', path=file, reason=larger)}\n"
    )


def test_a_table_in_a_pipe_has_120_columns_at_most_and_loses_no_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table()
    table.add_column("key", no_wrap=True)
    table.add_column("value")
    long = "/".join(f"folder{number}" for number in range(60))
    table.add_row("data.source", long)
    table.add_row("words", " ".join("word" for _ in range(100)))
    print_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= PIPE_COLUMNS == 120
    cells = [line.split("│")[2].strip() for line in lines if line.startswith("│")]
    assert "".join(cells).startswith(long)


def test_temporary_files_are_found_a_place_where_tmpdir_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert Beat.of(0, 1, Position(), main_calls()).at
