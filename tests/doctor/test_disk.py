"""The doctor's check of a filesystem: a good one has no problems, and each planted fault is
named."""

import errno
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.places import place
from tools.verify.doctor import disk
from tools.verify.doctor.disk import Disk, filesystem_of, judge, probe, try_filesystem
from tools.verify.doctor.finding import OK, WRONG


def test_a_good_folder_has_no_problems_and_is_left_as_it_was(tmp_path: Path) -> None:
    found = probe(place(tmp_path))
    assert found["problems"] == [] and found["fsync_s"] > 0 and list(tmp_path.iterdir()) == []
    (finding,) = judge([found])
    assert finding.verdict == OK and str(tmp_path) in finding.message


def missing_for_a_moment(old: Path, new: Path) -> None:
    """What a mount of an object store does: the new name is absent between removal and copy."""
    if new.is_file():
        new.unlink()
        time.sleep(0.01)
    old.rename(new)


def written_in_place(old: Path, new: Path) -> None:
    """The content arrives in parts under the final name."""
    if old.is_dir():
        old.rename(new)
        return
    content = old.read_bytes()
    with new.open("wb", buffering=0) as file:
        file.write(content[:100])
        time.sleep(0.01)
        file.write(content[100:])
    old.unlink()


def refuse_folders(old: Path, new: Path) -> None:
    if old.is_dir():
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    old.replace(new)


def no_sync(path: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument", str(path))


def no_lock(descriptor: int, how: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


FAULTS: dict[str, tuple[Disk, str]] = {
    "a name that is absent": (
        Disk(rename=missing_for_a_moment),
        "rename is not atomic: a reader found no file",
    ),
    "content in parts": (
        Disk(rename=written_in_place),
        r"rename is not atomic: a reader found (0|100) of 4096 bytes",
    ),
    "folders": (
        Disk(rename=refuse_folders),
        r"a folder cannot be renamed \(Invalid cross-device link\)",
    ),
    "fsync": (Disk(sync=no_sync), r"fsync fails \(Invalid argument\)"),
    "locks refused": (Disk(lock=no_lock), "locks do not hold: No locks available"),
    "locks without effect": (
        Disk(lock=lambda *_: None),
        "locks do not hold: two processes can have the same one",
    ),
    "room": (Disk(free=lambda folder: 10**6), "977 KiB free, but at least 1.00 GiB are needed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_of_a_filesystem_is_named_and_only_it(
    fault: str, tmp_path: Path
) -> None:
    planted, said = FAULTS[fault]
    ((problem, remedy),) = try_filesystem(tmp_path, 0, planted)["problems"]
    assert re.match(said, problem) and remedy
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_that_of_the_checkpoints_of_the_run(tmp_path: Path) -> None:
    ((said, _),) = try_filesystem(tmp_path, 2**50)["problems"]
    assert "but the run's checkpoints take 1.00 PiB" in said


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    ((said, remedy),) = try_filesystem(tmp_path / "file", 0)["problems"]
    assert "ENOTDIR" in said and "--folder" in remedy


@pytest.mark.parametrize("seconds", [-30.0, 30.0])
def test_a_file_server_with_another_clock_is_named(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted: Callable[[Path], Any] = lambda own: seconds  # noqa: E731
    monkeypatch.setattr(disk, "_file_time", shifted)
    found = probe(place(tmp_path))
    (finding,) = judge([found])
    assert (
        finding.verdict == WRONG
        and f"new files are {seconds:+.1f} s from this host's clock" in finding.message
    )


def test_the_type_of_a_filesystem_is_that_of_the_mount_nearest_to_it() -> None:
    assert filesystem_of(Path("/proc/self")) in ("proc", "")
