"""Every write can fail: an error of the disk in any single operation of a save, of a resumed run or
of a data build leaves the folder whole, is told in lines and not in a traceback, and the same
command then goes on.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fail_one_write.c")
WORDS = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler: operations of the C library are replaced")
    path = tmp_path_factory.mktemp("library") / "fail_one_write.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-ldl"], check=True)
    return path


def cases(library: Path, job: str, folder: Path, every: int) -> tuple[list[dict[str, Any]], int]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tests.checkpoint.every_write", job, str(folder), str(every)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[:-1], lines[-1]["operations"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("job", "every", "least"),
    [
        ("save", 3, 20),
        ("resume", 17, 60),
        ("data", 13, 20),
        pytest.param("save", 1, 20, marks=pytest.mark.slow),
        pytest.param("resume", 1, 60, marks=pytest.mark.campaign),
        pytest.param("data", 1, 20, marks=pytest.mark.slow),
    ],
)
def test_a_single_failing_operation_is_told_and_the_same_command_goes_on(
    job: str, every: int, least: int, library: Path, tmp_path: Path
) -> None:
    found, operations = cases(library, job, tmp_path, every)
    assert operations >= least, "there was nothing to fail"
    assert len(found) == 2 * -(-operations // every)
    for case in found:
        assert "Traceback" not in case["said"] and case["code"] in (0, 2), case
        assert case["code"] == 0 or WORDS[case["errno"]] in case["said"], case
        assert case["again"] == 0 and "Traceback" not in case["said again"], case
    assert any(case["code"] == 2 for case in found), "no operation mattered"
