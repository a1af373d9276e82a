"""An error of the disk while a file is read names the file: the system does not say which one it
was."""

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprec.durable import file_error, make_folder, read_whole, reading, write_file
from tests.project.test_readme import ROOT

FAILS = Path("/proc/self/mem")  # nothing is mapped at its beginning, so to read it is an I/O error
OTHERWISE = {
    "megaprec/errors.py": "its own sentences",
    "megaprec/front_door.py": "its own source",
    "parallel/hangs/heartbeat.py": "files of the kernel, which may be missing",
    "megaprec/resources.py": "files of the kernel, which may be missing",
    "megaprec/comm/gloo_ports.py": "a file of the kernel, which may be missing",
    "megaprec/diagnose/position.py": "files of the kernel, which may be missing",
    "megaprec/tokens/files.py": "a file that is written",
    "megaprec/text/arrow_work.py": "a process of its own; the process that started it names the file",
    "megaprec/text/limits.py": "a file of the kernel, which may be missing",
    "megaprec/text/encoding.py": "a worker without the package; the process that started it names the file",
    "megaprec/text/tokenizer_trial.py": "a process of its own; the process that started it names the file",
    "parallel/joining.py": "files of the kernel, which may be missing",
    "tools/analysis/calibration/record.py": "a file of the kernel, which may be missing",
    "megaprec/text/packed_files.py": "its errors have the file, and the line too",
    "megaprec/tokens/places.py": "its errors have the URL",
    "megaprec/tokens/ranges.py": "its errors have the URL",
    "megaprec/train_program.py": "a file of the command that it has started, in a temporary folder",
    "tools/recipes/recipe.py": "a file of the package",
    "tools/convert/core/untrusted.py": "a process without the package; the process that started it names the file",
    "tools/training/torchrun.py": "files of the kernel, which may be missing",
    "tools/journal/run_id.py": "its errors are told with the tracker",
}
# read what they have just written
OWN_FILES = (
    "tools/bench/",
    "tools/verify/doctor/",
    "tools/verify/parity/",
    "tools/verify/prove/",
)


def unnamed_reads(file: Path) -> Iterator[int]:
    """Yield the lines of a module that read a file, but not by `read_whole`, `reading` or inside
    `naming_file`."""
    tree = ast.parse(file.read_text())
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any("naming_file(" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in inside and is_read(node):
            yield node.lineno


def is_read(call: ast.Call) -> bool:
    """Say whether a call reads a whole file, or opens one and not to write."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_bytes", "read_text"):
        return True
    names = (getattr(call.func, "attr", None), getattr(call.func, "id", None))
    return "open" in names and bool(re.search(r"['\"]r?b?\+?b?['\"]", ast.unparse(call)))


def test_all_that_users_give_is_read_so_that_an_error_names_it() -> None:
    files = [
        file
        for room in ("megaprec", "models", "parallel", "tools")
        for file in (ROOT / room).rglob("*.py")
    ]
    names = {str(file.relative_to(ROOT)): file for file in files}
    found = {
        f"{name}:{line}"
        for name, file in names.items()
        if name not in OTHERWISE and not name.startswith(OWN_FILES)
        for line in unnamed_reads(file)
    }
    assert not found
    assert all([*unnamed_reads(names[name])] for name in OTHERWISE), (
        "one of these needs no exception any more"
    )


@pytest.mark.skipif(not FAILS.exists(), reason="no file here fails when it is read")
def test_a_disk_that_fails_in_the_middle_of_a_file_is_told_with_its_name() -> None:
    with pytest.raises(OSError, match="Input/output error") as whole:
        read_whole(FAILS)
    with pytest.raises(OSError, match="Input/output error") as part, reading(FAILS) as file:
        file.read(10)
    for error in (whole.value, part.value):
        assert (error.errno, error.filename) == (errno.EIO, str(FAILS))
        assert file_error(error) == f"{FAILS}: Input/output error (EIO): look at the disk"


def test_a_file_under_way_to_its_name_is_told_by_its_name_unless_it_is_itself_in_the_way() -> None:
    def told(number: int, *names: str) -> str:
        first, *second = names
        error = OSError(number, os.strerror(number), first, None, *second)
        return file_error(error).partition(": ")[0]

    for number in (errno.ENOSPC, errno.EACCES, errno.ENOENT):
        assert told(number, "a.png.part") == "a.png"
    assert told(errno.EISDIR, "a.png.part", "a.png") == "a.png"
    assert told(errno.EISDIR, "a.png.part") == "a.png.part"


def test_a_place_that_cannot_be_written_to_is_told_with_what_is_wrong_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, kind, said in (
        (tmp_path / "no" / "new", FileNotFoundError, f"no folder {tmp_path / 'no'}: make it"),
        (file / "new", NotADirectoryError, "a folder above it is a file"),
    ):
        with pytest.raises(kind) as caught:
            write_file(place, b"")
        assert said in file_error(caught.value)
    with pytest.raises(FileExistsError) as caught:
        make_folder(file)
    assert "something else has this name" in file_error(caught.value)
