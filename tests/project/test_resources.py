"""Quotas of containers, batch jobs and services bound the cores and the memory that are counted
on."""

import os
from pathlib import Path

import pytest

from megaprec.resources import cores, memory_bytes

HERE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MEBI = 2**20


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def system(folder: Path, groups: str, **files: str) -> Path:
    """A machine with these files of cgroups; __ stands for / and DOT for . in names."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("max 100000", 8),
    ],
)
def test_a_quota_of_cpu_time_counts_as_cores_rounded_up(
    quota: str, expected: int, tmp_path: Path
) -> None:
    assert cores(system(tmp_path, "0::/\n", cpuDOTmax=quota)) == expected


@pytest.mark.parametrize(("quota", "expected"), [("150000\n", 2), ("-1\n", 8)])
def test_so_does_one_of_the_first_version_of_cgroups(
    quota: str, expected: int, tmp_path: Path
) -> None:
    files = {"cpu__job__cpuDOTcfs_quota_us": quota, "cpu__job__cpuDOTcfs_period_us": "100000\n"}
    assert (
        cores(system(tmp_path, "4:memory:/other\n3:cpu,cpuacct:/job\n0::/\n", **files)) == expected
    )


def test_controllers_that_are_mounted_together_have_one_folder(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct__job__cpuDOTcfs_quota_us": "150000\n",
        "cpu,cpuacct__job__cpuDOTcfs_period_us": "100000\n",
    }
    assert cores(system(tmp_path, "3:cpu,cpuacct:/job\n", **files)) == 2


def test_a_group_may_have_any_name(tmp_path: Path) -> None:
    here = system(tmp_path, "0::/job\n", cpuDOTmax="200000 100000")
    (here / "proc/self/cgroup").write_bytes(b"0::/job \xe9\n")
    assert cores(here) == 2


def test_the_smallest_limit_of_all_enclosing_groups_counts(tmp_path: Path) -> None:
    files = {
        "memoryDOTmax": "max",
        "job__memoryDOTmax": f"{64 * MEBI}",
        "job__step__memoryDOTmax": f"{128 * MEBI}",
    }
    files |= {"job__cpuDOTmax": "300000 100000", "job__step__cpuDOTmax": "500000 100000"}
    here = system(tmp_path, "0::/job/step\n", **files)
    assert (memory_bytes(here), cores(here)) == (64 * MEBI, 3)


@pytest.mark.parametrize("place", ["/docker/0123abcd", "/../../job"])
def test_in_a_container_the_outermost_folder_is_its_own_group(place: str, tmp_path: Path) -> None:
    files = {"memory__memoryDOTlimit_in_bytes": f"{32 * MEBI}\n", "memoryDOTmax": f"{48 * MEBI}\n"}
    assert memory_bytes(system(tmp_path / "first", f"4:memory:{place}\n", **files)) == 32 * MEBI
    assert memory_bytes(system(tmp_path / "second", f"0::{place}\n", **files)) == 48 * MEBI


def test_without_limits_the_machine_is_counted_on(tmp_path: Path) -> None:
    assert (memory_bytes(tmp_path), cores(tmp_path)) == (HERE, 8)
    unlimited = {"memory__memoryDOTlimit_in_bytes": "9223372036854771712\n"}
    assert memory_bytes(system(tmp_path, "4:memory:/\n", **unlimited)) == HERE
