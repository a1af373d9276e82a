"""Folders for the time of a command are gone after it; after one that was killed, with the next."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from megaprec.scratch import scratch_folder

ROOT = Path(__file__).parents[2]
# makes a folder beside the checkpoints of a world, where all its machines find it
ELSEWHERE = "tools/commands/doctor_layout.py"


def left_by_a_killed_process(place: Path) -> Path:
    """A folder for the time of a process that has been killed within."""
    child = os.fork()
    if not child:
        used = scratch_folder("prove", str(place))
        used.__enter__()
        (folder,) = place.iterdir()
        (folder / "checkpoint").write_bytes(b"large")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (folder,) = place.iterdir()
    return folder


def test_what_a_killed_command_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = left_by_a_killed_process(tmp_path)
    assert (left / "checkpoint").is_file()
    with scratch_folder("parity", str(tmp_path)) as folder:
        assert [*tmp_path.iterdir()] == [Path(folder)]
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    with scratch_folder("prove", str(tmp_path)) as used:
        Path(used, "file").touch()
        with scratch_folder("prove", str(tmp_path)) as other:
            assert Path(used, "file").is_file() and used != other


def test_what_others_have_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by_a_killed_process(tmp_path)
    (tmp_path / "megaprec_mine").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ".in_use").write_text(socket.gethostname())
    (tmp_path / "megaprec_link").symlink_to(tmp_path / "link")
    # locks of other machines are not seen on every shared disk
    monkeypatch.setattr(socket, "gethostname", lambda: "another machine")
    with scratch_folder("prove", str(tmp_path)):
        pass
    names = [left.name, "link", "megaprec_link", "megaprec_mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    monkeypatch.undo()
    with scratch_folder("prove", str(tmp_path)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_an_error_within_is_the_one_that_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="mine"),
        scratch_folder("prove", str(tmp_path)),
    ):
        raise ValueError("mine")
    assert [*tmp_path.iterdir()] == []


def test_every_folder_for_the_time_of_a_command_is_one_that_the_next_command_removes() -> None:
    others = list[str]()
    for package in ("megaprec", "parallel", "models", "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith("tools/bench/") or name in ("megaprec/scratch.py", ELSEWHERE):
                continue
            if re.search(r"TemporaryDirectory|mkdtemp", path.read_text("utf-8")):
                others.append(name)
    assert others == []
