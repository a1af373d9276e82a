"""One mutant beside its laws, in a copy of the tree."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.changes import Mutant
from tests.mutants.laws import laws_of

KILLED = "killed"
SURVIVED = "survived"
# known to change nothing that anybody could see, and not tried
EQUIVALENT = "equivalent"
# nothing computes any more: a law would say so when its own last resort is over
HANGS = "hangs"
IDLE_SECONDS = 120
CLOCK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    by: the law that failed, of an equivalent one the reason. crashed: True if it failed by another error than an assertion of its
        own.
    seconds: of processor time.
    whole: False for a survivor whose laws were not all tried, because the time was used up.
    """

    outcome: str
    by: str = ""
    crashed: bool = False
    seconds: float = 0.0
    whole: bool = True


@dataclass(frozen=True)
class Failure:
    """The first law that failed, and what it said. At import, the law is a file."""

    law: str
    said: str
    at_import: bool

    @property
    def crashed(self) -> bool:
        """Return True if no assertion has failed, and nothing was waited for in vain."""
        found = r"AssertionError|DID NOT RAISE|not close|not equal|not done after"
        return not re.search(found, self.said)


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Yields a copy of the last commit of the tree at `root`, and removes it at the end."""
    with tempfile.TemporaryDirectory(prefix="megaprec_mutants_") as temporary:
        tree = Path(temporary) / "tree"
        _git(root, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def commit_of(root: Path) -> str:
    """Return the name of the last commit."""
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


@dataclass
class Trials:
    """Trials of mutants in a copy of the tree.

    seconds: of processor time, for one mutant.
    known_to_fail: laws that fail without a change too, by whether they do.
    """

    tree: Path
    seconds: float
    known_to_fail: dict[str, bool] = field(default_factory=dict)

    def tried(self, mutant: Mutant) -> Verdict:
        """Return what the laws say about a mutant. The tree is afterwards as it was."""
        used = 0.0
        for laws in laws_of(self.tree, mutant.path):
            left_out: list[str] = []
            while laws:
                with self._changed(mutant):
                    run = self._run(laws, self.seconds - used, left_out)
                used += run.seconds
                if run.hangs:
                    return Verdict(HANGS, seconds=used)
                if run.failure is None and not run.ended:
                    return Verdict(SURVIVED, seconds=used, whole=False)
                if run.failure is None:
                    break
                if not self._fails_anyway(run.failure):
                    return Verdict(KILLED, run.failure.law, run.failure.crashed, used)
                left_out.append(run.failure.law)
        return Verdict(SURVIVED, seconds=used)

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        file = self.tree / mutant.path
        source = file.read_bytes()
        compiled = Path(importlib.util.cache_from_source(str(file)))
        file.write_bytes(mutant.applied(source))
        # Python goes by size and second of change, which may be those of the file before
        compiled.unlink(missing_ok=True)
        try:
            yield
        finally:
            file.write_bytes(source)
            compiled.unlink(missing_ok=True)

    def _fails_anyway(self, failure: Failure) -> bool:
        """Return True for a law that fails in the tree as it is."""
        if failure.law not in self.known_to_fail:
            options = ["--collect-only"] if failure.at_import else []
            run = self._run([failure.law], float("inf"), [], options)
            self.known_to_fail[failure.law] = run.failure is not None
        return self.known_to_fail[failure.law]

    def _run(
        self,
        laws: Sequence[str],
        seconds: float,
        left_out: Sequence[str],
        options: Sequence[str] = (),
    ) -> "_Run":
        """Run pytest on laws until one fails or the processor time is used up."""
        with tempfile.TemporaryDirectory(prefix="laws_", dir=self.tree.parent) as temporary:
            report = Path(temporary) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *options]
            command += [f"--deselect={law}" for law in left_out]
            environment = {**os.environ, "PYTHONPATH": str(self.tree), "TMPDIR": temporary}
            with open(Path(temporary) / "said.txt", "w") as said:
                process = subprocess.Popen(
                    [*command, *laws],
                    cwd=self.tree,
                    env=environment,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
                try:
                    used, ended, hangs = _watch(process, seconds)
                finally:
                    end(process)
            return _Run(first_failure(report) if ended else None, used, ended, hangs)


@dataclass(frozen=True)
class _Run:
    """One call of pytest. ended: by itself."""

    failure: Failure | None
    seconds: float
    ended: bool
    hangs: bool


def first_failure(report: Path) -> Failure | None:
    """Return the first failure in a report of pytest. Without a report pytest itself has failed."""
    if not report.exists():
        return Failure("pytest", "no report", at_import=True)
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((one for one in case if one.tag in ("failure", "error")), None)
        if found is None:
            continue
        file = case.get("file") or f"{case.get('classname', '')}{case.get('name', '')}"
        at_import = "collection failure" in (found.get("message") or "")
        said = f"{found.get('message')}\n{found.text}"
        if at_import:
            name = (case.get("name") or "").replace(".", "/")
            return Failure(case.get("file") or f"{name}.py", said, at_import)
        return Failure(f"{file}::{case.get('name')}", said, at_import)
    return None


def _watch(process: "subprocess.Popen[bytes]", seconds: float) -> tuple[float, bool, bool]:
    """Wait for the end of pytest, of its processor time, or of all that happens.

    Returns the processor time, whether it has ended by itself, and whether nothing happened.
    """
    used = 0.0
    before = 0.0
    moved = time.monotonic()
    while process.poll() is None:
        # less than before when a process has ended whose parent was gone
        now = processor_seconds(process.pid)
        if now > before:
            used += now - before
            moved = time.monotonic()
        before = now
        if used > seconds:
            return used, False, False
        if time.monotonic() - moved > IDLE_SECONDS:
            return used, False, True
        time.sleep(0.2)
    return used, True, False


def processor_seconds(session: int) -> float:
    """Return the processor time of the processes of a session that live, and of their children that
    have ended."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / CLOCK


def end(process: "subprocess.Popen[Any]") -> None:
    """End pytest and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
