"""Making tokens of text takes the same memory for a long text as for a short one: all processes
together, measured."""

import json
import sys
from pathlib import Path
from shutil import which

import pytest

from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from tools.bench.memory import peak

BOUND = 1_000_000_000  # bytes
GROWTH = 60_000_000  # bytes more for as many characters more; 8 to 33 million were found
BLOCK = 10_000_000  # characters
STARTS_MANY = """
import subprocess, sys
large = b"x" * 200_000_000
for _ in range(300):
    subprocess.run([sys.argv[1]])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/smaps_rollup").exists(),
        reason="memory is read from /proc, which only Linux has",
    ),
]


def test_memory_is_bounded_and_does_not_grow_with_the_text(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": text}) + "\n"
        for _, text in open_source("python", TextOptions(max_chars=BLOCK))
    ]
    found = []
    for repeats in (4, 10):  # before 4, buffers still fill
        path = tmp_path / f"{repeats}.jsonl"
        with path.open("w") as file:
            for _ in range(repeats):
                file.writelines(lines)
        command = [
            sys.executable,
            "-m",
            "megaprec",
            "data",
            "build",
            str(path),
            str(tmp_path / f"out{repeats}"),
        ]
        found.append(peak([*command, "--vocab-size", "400", "--workers", "2"], interval=0.1)[0])
    assert max(found) < BOUND
    assert found[1] - found[0] < GROWTH, f"{found} bytes"


def test_memory_of_a_program_does_not_count_twice_while_it_starts_another() -> None:
    true = which("true")
    assert true
    largest, looks = peak([sys.executable, "-c", STARTS_MANY, true], interval=0.01)
    assert looks > 10
    assert 200_000_000 < largest < 300_000_000
