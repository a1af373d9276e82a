"""One session of pytest in a tree with switches: which laws reach which mutants, and which fail.

`python -m tests.mutants.session JOB` reads what to try from a file, and adds a line to another when
laws are collected, and one for each law or mutant that is done. Modules are imported and laws
collected once for all mutants. A law that has failed is tried again without the mutant.
"""

import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import switch

OURS = ("megaprec", "parallel", "models", "tools", "tests")


@dataclass(frozen=True)
class Job:
    """What one session does.

    laws: files of laws to collect.
    done: the file of results.
    mutants: the laws that each mutant is tried by, by its number; none: each law is tried once
        without a mutant.
    """

    laws: list[str]
    done: str
    mutants: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reach:
    """A law without any mutant: what it took, and the switches that it reached."""

    law: str
    passed: bool
    seconds: float
    reached: list[int]


@dataclass(frozen=True)
class Trial:
    """A mutant beside its laws. by: the law that failed, "" if none did; said: what it said."""

    number: int
    by: str = ""
    said: str = ""


class Session:
    """The plugin of pytest that does a job in place of running each test once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.unreliable = set[str]()
        self._said: list[str] = []
        self._reached_by = dict[object, frozenset[int]]()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Notes what a fixture reaches that other laws find ready."""
        value = yield
        if fixturedef.scope != "function":
            self._reached_by[fixturedef] = switch.reached()
        return value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._said.append(f"{report.when}: {report.longreprtext}")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # what is computed while modules are imported no switch changes any more
        self._keep({"collected": len(session.items), "at_import": sorted(switch.reached())})
        results = self._trials(session) if self.job.mutants else self._reaches(session)
        for result in results:
            self._keep(asdict(result))
        return True

    def _keep(self, result: dict[str, Any]) -> None:
        with Path(self.job.done).open("a") as done:
            done.write(json.dumps(result) + "\n")

    def _reaches(self, session: pytest.Session) -> Iterator[Reach]:
        file = None
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            # laws of a file may share results that take long
            if item.path != file:
                _forget_results()
                file = item.path
            switch.choose(switch.NONE)
            start = time.perf_counter()
            said = self._failure(item, following)
            seconds = time.perf_counter() - start
            reached = switch.reached().union(*self._reached_before(item))
            yield Reach(item.nodeid, not said, seconds, sorted(reached))

    def _reached_before(self, item: pytest.Item) -> list[frozenset[int]]:
        """Return what the fixtures reached that this law shares with others."""
        assert isinstance(item, pytest.Function)
        of_names = item._fixtureinfo.name2fixturedefs.values()
        fixtures = [fixture for of_name in of_names for fixture in of_name]
        return [self._reached_by.get(fixture, frozenset()) for fixture in fixtures]

    def _trials(self, session: pytest.Session) -> Iterator[Trial]:
        items = {item.nodeid: item for item in session.items}
        for number, laws in self.job.mutants.items():
            yield self._trial(number, [items[law] for law in laws if law in items])

    def _trial(self, number: int, items: Sequence[pytest.Item]) -> Trial:
        """Try laws until one fails that does not fail without the mutant."""
        _forget_results()
        for item, following in zip(items, [*items[1:], None], strict=True):
            if item.nodeid in self.unreliable:
                continue
            switch.choose(number)
            said = self._failure(item, following)
            if not said:
                continue
            _forget_results()
            _tear_down(item)
            switch.choose(switch.NONE)
            if not self._failure(item, None):
                return Trial(number, item.nodeid, said)
            self.unreliable.add(item.nodeid)
            _tear_down(item)
        return Trial(number)

    def _failure(self, item: pytest.Item, following: pytest.Item | None) -> str:
        """Run a law; what it says if it fails, else "". following: the law whose fixtures are kept,
        besides those of the session."""
        self._said.clear()
        kept = following or item.session
        item.session._setupstate.teardown_exact(item)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=kept)
        return "\n".join(self._said)


def _tear_down(item: pytest.Item) -> None:
    """End the fixtures of all but the session."""
    item.session._setupstate.teardown_exact(item.session)  # pyright: ignore[reportArgumentType]


def _forget_results() -> None:
    """Empty the caches of functions of ours, which may have the results of another mutant."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OURS:
            for value in list(vars(module).values()):
                _forget(value)


def _forget(value: object) -> None:
    if isinstance(value, _lru_cache_wrapper):
        value.cache_clear()
    elif isinstance(value, type) and value.__module__.partition(".")[0] in OURS:
        for inner in list(vars(value).values()):
            if isinstance(inner, _lru_cache_wrapper):
                inner.cache_clear()


def main(file: str) -> int:
    """Do the job of a file."""
    read = json.loads(Path(file).read_text())
    mutants = {int(number): laws for number, laws in read.pop("mutants").items()}
    session = Session(Job(**read, mutants=mutants))
    return pytest.main(["-q", "-p", "no:cacheprovider", *session.job.laws], [session])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
