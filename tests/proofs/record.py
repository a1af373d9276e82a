"""The record of a proof: its commands are run, and what they print is kept."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.proofs.proofs import Proof

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).parent / "records"
PACKAGES = ("torch", "numpy", "transformers")
MOST_COLUMNS = 120  # of a printed line that is kept
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Printed:
    """One command: its line, its exit code, and the last lines that it printed."""

    command: str
    code: int
    lines: list[str]


@dataclass(frozen=True)
class Record:
    """One run of a proof. minutes: that it took. seen: its commands, up to the first that failed."""

    name: str
    date: str
    commit: str
    machine: str
    versions: str
    minutes: float
    seen: list[Printed]

    @property
    def proven(self) -> bool:
        return all(printed.code == 0 for printed in self.seen)

    @classmethod
    def of(cls, table: dict[str, Any]) -> "Record":
        seen = [Printed(**printed) for printed in table["seen"]]
        return cls(**{**table, "seen": seen})


def run_proof(proof: Proof, sample: bool = False) -> Record:
    """Run the commands of a proof in the root of the clone, and return the record."""
    start = time.monotonic()
    seen: list[Printed] = []
    for command in proof.sample if sample else proof.commands:
        printed = run_command(command, proof.lines)
        seen.append(printed)
        if printed.code:
            break
    return Record(
        name=proof.name,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=_commit(),
        machine=_machine(),
        versions=_versions(),
        minutes=round((time.monotonic() - start) / 60, 1),
        seen=seen,
    )


def run_command(command: str, most_lines: int) -> Printed:
    """Run a line of a shell, with this Python's programs on the path."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ended = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "COLUMNS": str(MOST_COLUMNS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = [_kept(line) for line in ended.stdout.splitlines()]
    shown = [line for line in lines if line]
    return Printed(command, ended.returncode, shown[-most_lines:])


def _kept(line: str) -> str:
    """Return a printed line without colours and the path of the clone."""
    plain = ESCAPES.sub("", line).replace(str(ROOT), ".").rstrip()
    return plain[:MOST_COLUMNS]


def _commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _machine() -> str:
    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} {platform.machine()}, {cores} cores, {memory:.0f} GiB"


def _versions() -> str:
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def save(record: Record) -> None:
    """Write the record of a proof in place of an older one."""
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False)
    (RECORDS / f"{record.name}.json").write_text(text + "\n", encoding="utf-8")


def read(name: str) -> Record | None:
    """Return the record of a proof; None if it was not tried."""
    file = RECORDS / f"{name}.json"
    return Record.of(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
