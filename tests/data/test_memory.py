"""Making tokens of text takes the same memory for a long text as for a short one: all processes together, measured."""

import json
import sys
from pathlib import Path

import pytest

from megaprec.data.text import open_source
from tools.bench.memory import peak

BOUND = 1_000_000_000  # bytes
GROWTH = 60_000_000  # bytes more for six times the text
BLOCK = 10_000_000  # characters


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
        command = [sys.executable, "-m", "megaprec", "data", "build", str(path), str(tmp_path / f"out{repeats}")]
        found.append(peak([*command, "--vocab-size", "2000", "--workers", "2"], often=0.1)[0])
    assert max(found) < BOUND
    assert found[1] - found[0] < GROWTH, f"{found} bytes"
