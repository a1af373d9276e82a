"""Making tokens of text takes the same memory for a long text as for a short one: all processes together, measured."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaprec.data.text import open_source
from tests.test_readme import ROOT

BOUND = 1_000_000_000  # bytes
GROWTH = 60_000_000  # bytes more for six times the text
BLOCK = 10_000_000  # characters


def held(pid: int) -> int:
    """Bytes of memory of a process and all that it started. A page that several of them hold is shared out among them:
    just after a fork that is all of it, and would else count twice."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = [c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return own + sum(held(int(child)) for child in children)


def peak(text: Path, prefix: Path) -> int:
    command = [sys.executable, "-m", "tools.cli", "data", "build", str(text), str(prefix)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "--vocab-size", "2000", "--workers", "2"], cwd=ROOT, env=environment) as process:
        largest = 0
        while process.poll() is None:
            largest = max(largest, held(process.pid))
            time.sleep(0.1)
    assert process.returncode == 0
    return largest


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc, which only Linux has"
)
def test_memory_is_bounded_and_does_not_grow_with_the_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) + "\n" for _, text in open_source("python", max_chars=BLOCK)]
    found = []
    for repeats in (1, 6):
        path = tmp_path / f"{repeats}.jsonl"
        with path.open("w") as file:
            for _ in range(repeats):
                file.writelines(lines)
        found.append(peak(path, tmp_path / f"out{repeats}"))
    assert max(found) < BOUND
    assert found[1] - found[0] < GROWTH, f"{found} bytes"
