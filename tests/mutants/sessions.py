"""Mutants of one tree beside the laws that reach them, in sessions of pytest side by side."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar

from tests.mutants import switch
from tests.mutants.changes import Mutant
from tests.mutants.kinship import kinship
from tests.mutants.laws import laws_of
from tests.mutants.session import Job, Reach, Trial
from tests.mutants.switches import with_switches
from tests.mutants.trial import (
    HANGS,
    IDLE_SECONDS,
    KILLED,
    SURVIVED,
    Failure,
    Verdict,
    end,
    processor_seconds,
)

Part = TypeVar("Part")
Done = TypeVar("Done")
ROOT = Path(__file__).parents[2]
# of the processor time that its laws took without a mutant, which may be more with one
PATIENCE = 5
LOOK_SECONDS = 0.5
CASES = 2  # of a law that are tried before those of other laws
PARTS = 4  # of each worker's laws, so that none waits long for another


def switched(tree: Path, mutants: Sequence[Mutant]) -> dict[int, Mutant]:
    """Put mutants into the files of `tree`, each behind a switch, and return those that have one,
    by the number of the switch."""
    have = dict[int, Mutant]()
    numbered = dict(enumerate(mutants))
    for path in sorted({mutant.path for mutant in mutants}):
        here = {number: one for number, one in numbered.items() if one.path == path}
        text, numbers = with_switches((tree / path).read_bytes(), here)
        (tree / path).write_text(text)
        have |= {number: here[number] for number in numbers}
    return have


def reaches(tree: Path, paths: Iterable[str], workers: int) -> tuple[list[Reach], frozenset[int]]:
    """Return what each fast law of these files of code reaches, in a tree with switches, and which
    switches are reached when modules are imported."""
    laws = sorted({law for path in set(paths) for some in laws_of(tree, path) for law in some})
    num_parts = PARTS * workers
    parts = [laws[number::num_parts] for number in range(num_parts)]

    def done_by(part: list[str], over: Event) -> tuple[list[Reach], frozenset[int]]:
        with _session(tree, part, {}) as session:
            while session.process.poll() is None and not over.wait(LOOK_SECONDS):
                pass
            found = [Reach(**line) for line in session.new_lines()]
            return found, session.at_import

    done = _side_by_side(done_by, parts, workers)
    found = [reach for some, _ in done for reach in some]
    return found, frozenset[int]().union(*(at_import for _, at_import in done))


def _side_by_side(
    work: Callable[[Part, Event], Done], parts: Sequence[Part], workers: int
) -> list[Done]:
    """Return what `work` returns of each part. It ends early once the event is set: if this process
    is interrupted."""
    over = Event()
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, part, over) for part in parts]
        try:
            return [future.result() for future in futures]
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)


def chosen_laws(
    tree: Path, number: int, mutant: Mutant, reached: Sequence[Reach], seconds: float
) -> tuple[list[str], bool]:
    """Return the laws that a mutant is tried by, in order, and whether these are all that reach it.

    First come those that speak most of its line (`kinship`), two cases of each; then further cases;
    last those that may have found ready what another one of their file has computed. All of them
    together take `seconds` at most. tree: without switches.
    """
    files = {_file_of(law) for law in reached if number in law.reached}
    cases = Counter[str]()
    keyed: list[tuple[bool, int, float, Reach]] = []
    for law in sorted(reached, key=lambda law: law.seconds):
        if _file_of(law) not in files or not law.passed:
            continue
        is_own = number in law.reached
        name = law.law.partition("[")[0]
        case = cases[name]
        cases[name] += is_own
        keyed.append((not is_own, case // CASES, -kinship(tree, mutant, law.law), law))
    keyed.sort(key=lambda key: key[:3])
    chosen: list[str] = []
    used = 0.0
    for *_, law in keyed:
        used += law.seconds
        if used > seconds:
            return chosen, False
        chosen.append(law.law)
    return chosen, True


def _file_of(law: Reach) -> str:
    return law.law.partition("::")[0]


def try_all(
    tree: Path,
    laws: Mapping[int, tuple[list[str], bool]],
    seconds: float,
    workers: int,
    tell: Callable[[int, Verdict], None],
) -> None:
    """Try mutants by their laws, and tell each verdict as it comes.

    laws: by the number of the mutant, and whether these are all that reach it.
    """
    lock = Lock()

    def told(number: int, verdict: Verdict) -> None:
        with lock:
            tell(number, verdict)

    def try_part(part: Mapping[int, tuple[list[str], bool]], over: Event) -> None:
        _try_part(tree, part, seconds, told, over)

    for number in [number for number, (chosen, _) in laws.items() if not chosen]:
        tell(number, Verdict(SURVIVED, "no law reaches it"))
    numbers = [number for number, (chosen, _) in laws.items() if chosen]
    parts = [{one: laws[one] for one in numbers[first::workers]} for first in range(workers)]
    _side_by_side(try_part, parts, workers)


def _try_part(
    tree: Path,
    laws: Mapping[int, tuple[list[str], bool]],
    seconds: float,
    tell: Callable[[int, Verdict], None],
    over: Event,
) -> None:
    """Try mutants one after the other, in a session that is started anew where one has ended it."""
    left = dict(laws)
    while left and not over.is_set():
        files = sorted({law.partition("::")[0] for chosen, _ in left.values() for law in chosen})
        mutants = {number: chosen for number, (chosen, _) in left.items()}
        with _session(tree, files, mutants) as session:
            for number, verdict in _verdicts(session, left, seconds, over):
                del left[number]
                tell(number, verdict)


def _verdicts(
    session: "_Session",
    laws: Mapping[int, tuple[list[str], bool]],
    seconds: float,
    over: Event,
) -> Iterator[tuple[int, Verdict]]:
    """Yield what a session finds, until it ends or has to be ended."""
    waiting = list(laws)
    while waiting and not over.wait(LOOK_SECONDS):
        is_running = session.process.poll() is None
        for line in session.new_lines():
            number = waiting.pop(0)
            trial = Trial(**line)
            assert trial.number == number
            yield number, _verdict(trial, session.used(), laws[number][1])
        if not waiting:
            return
        if not is_running:
            assert session.is_collected, session.output()
            yield waiting[0], Verdict(KILLED, "the end of pytest", True, session.used())
            return
        if session.idle_seconds() > IDLE_SECONDS:
            yield waiting[0], Verdict(HANGS, seconds=session.used())
            return
        if session.is_collected and session.spent() > PATIENCE * seconds:
            yield waiting[0], Verdict(SURVIVED, seconds=session.used(), whole=False)
            return


def _verdict(trial: Trial, seconds: float, whole: bool) -> Verdict:
    if not trial.by:
        return Verdict(SURVIVED, seconds=seconds, whole=whole)
    failure = Failure(trial.by, trial.said, at_import=False)
    return Verdict(KILLED, failure.law, failure.crashed, seconds)


@dataclass
class _Session:
    """A session of pytest that does a job."""

    process: "subprocess.Popen[str]"
    folder: Path
    is_collected: bool = False
    at_import: frozenset[int] = frozenset()
    _read: int = 0
    _before: float = 0.0
    _total: float = 0.0
    _moved: float = field(default_factory=time.monotonic)

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the results that have come since the last call."""
        done = self.folder / "done.jsonl"
        whole = done.read_text().rpartition("\n")[0].splitlines() if done.exists() else []
        new = [json.loads(line) for line in whole[self._read :]]
        self._read = len(whole)
        if new and not self.is_collected:
            self.is_collected = True
            self.at_import = frozenset(new.pop(0)["at_import"])
            self.used()
        return new

    def spent(self) -> float:
        """Return the processor time since the last result."""
        return processor_seconds(self.process.pid) - self._before

    def used(self) -> float:
        """Return the processor time since the last call."""
        now = processor_seconds(self.process.pid)
        since = max(0.0, now - self._before)
        self._before = now
        return since

    def idle_seconds(self) -> float:
        """Return how long ago any process of the session has used the processor."""
        now = processor_seconds(self.process.pid)
        if now != self._total:
            self._total = now
            self._moved = time.monotonic()
        return time.monotonic() - self._moved

    def output(self) -> str:
        return (self.folder / "said.txt").read_text()[-2000:]


@contextmanager
def _session(
    tree: Path, laws: Sequence[str], mutants: Mapping[int, list[str]]
) -> Iterator[_Session]:
    """Yield a session in `tree`, and end it with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="laws_", dir=tree.parent) as temporary:
        folder = Path(temporary)
        job = Job(list(laws), str(folder / "done.jsonl"), dict(mutants))
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        (folder / "tmp").mkdir()
        environment = {
            **os.environ,
            # the latter has the session, if the tree is another one's
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
            "TMPDIR": str(folder / "tmp"),
            switch.FOLDER: temporary,
        }
        with (folder / "said.txt").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.session", str(folder / "job.json")],
                cwd=tree,
                env=environment,
                stdout=said,
                stderr=said,
                text=True,
                start_new_session=True,
            )
            try:
                yield _Session(process, folder)
            finally:
                end(process)
