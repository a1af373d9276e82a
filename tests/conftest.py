"""What several files of tests ask for by name."""

import gc
import json
import os
import random
import signal
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from megaprec import tested_versions
from tests.project.forked_command import served
from tools.convert.core import torch_files
from tools.convert.core.untrusted import describe, describe_distributed
from tools.training.ends import SIGNALS

# How fast an example is says nothing on a machine that does other things too. The examples are the
# same in each run, so that a change is not blamed for what another one's luck finds;
# --hypothesis-profile=search draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("any machine")

# `make test` tells what it starts that make has started it, and a make of a test's own would then
# say so in its output.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how long each folder of tests took: the sum over its tests, whichever process ran
    them."""
    seconds = defaultdict[str, float](float)
    tests = Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            folder = str(Path(report.location[0]).parent)
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    terminalreporter.section("seconds by folder")
    for folder in sorted(seconds):
        terminalreporter.write_line(f"{seconds[folder]:8.1f} s  {tests[folder]:5} tests  {folder}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--part 2/6`, which tries the second sixth of the slow laws that the other options
    choose, and all fast ones."""
    parser.addoption(
        "--part", type=part, default=(1, 1), help="K/N: the K-th of N parts of the slow tests"
    )


def part(asked: str) -> tuple[int, int]:
    """Returns number and count of the part that `--part` names."""
    number, parts = map(int, asked.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(asked)
    return number, parts


def leave_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the slow laws of other parts than `--part` says; all slow cases of a law are in one
    part."""
    number, parts = config.option.part
    others = [
        item
        for item in items
        if item.get_closest_marker("slow") and part_of(item.nodeid, parts) != number
    ]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def part_of(test: str, parts: int) -> int:
    """Returns the part that a test is in, which is that of its law on any machine."""
    law = test.partition("[")[0]
    return zlib.crc32(law.encode()) % parts + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of a test beyond those that `@pytest.mark.cases(fast, slow=None,
    sample=None)` gives, and deselects what `--part` leaves to other runs.

    The first `fast` cases are fast, all if it is None; those that are marked slow themselves are
    not. The next `slow` are slow, or as many as `sample` says, drawn from all that are left by a
    seed of the test's own, so that as many values of parameters as can be are tried; without either
    all are. The rest is for a campaign.
    """
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("campaign"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("cases")
        assert mark is not None
        _divide(name, cases, *mark.args, **mark.kwargs)
    leave_other_parts(config, items)


def _divide(
    name: str,
    cases: Sequence[pytest.Item],
    fast: int | None,
    slow: int | None = None,
    sample: int | None = None,
) -> None:
    beyond = [case for case in cases if case.get_closest_marker("slow")]
    fast_ones = [case for case in cases if case not in beyond][:fast]
    left = [case for case in cases if case not in fast_ones]
    chosen = left[:slow] if sample is None else _drawn(name, fast_ones, left, sample)
    for case in left:
        whole = case.parent and case.parent.get_closest_marker("slow")
        assert not whole, (
            f"{name}: its module is marked slow, and so is what is left to a campaign: mark "
            "each test"
        )
        case.own_markers[:] = [one for one in case.own_markers if one.name != "slow"]
        case.add_marker("slow" if case in chosen else "campaign")


def _drawn(
    seed: str, tried: Sequence[pytest.Item], left: Sequence[pytest.Item], size: int
) -> list[pytest.Item]:
    """Returns `size` of the cases that are left, each with as many parameters as can be whose
    values are new then."""
    drawn = random.Random(seed).sample(left, len(left))
    chosen: list[pytest.Item] = []
    seen = {value for case in tried for value in _values(case)}
    while drawn and len(chosen) < size:
        best = max(drawn, key=lambda case: len(_values(case) - seen))
        drawn.remove(best)
        chosen.append(best)
        seen |= _values(best)
    return chosen


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    """Returns the parameters of a case with their values, by which values are told apart."""
    assert isinstance(case, pytest.Function)
    return {(parameter, repr(value)) for parameter, value in case.callspec.params.items()}


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test with the marker `gpu` where torch sees fewer GPUs than it needs."""
    mark = item.get_closest_marker("gpu")
    needed = (mark.args or (1,))[0] if mark else 0
    if needed > (there := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        pytest.skip(
            f"needs {needed} GPU{'s' if needed > 1 else ''}, and torch sees {there}: make gpu"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """Has every test draw the same numbers, whichever tests have drawn some before it in this
    process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Takes the modules that are imported by now out of garbage collection, as tests/frozen.py does
    in ranks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine remembers of token files is not what the user's own account remembers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def versions_read_once() -> Iterator[None]:
    """What is installed stays the same while tests run; each command would read it from a file of
    each package."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("requires", "version"):
            patch.setattr(tested_versions, name, cache(getattr(tested_versions, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Commands that tests start hear Ctrl-C, which they would ignore if a script has started the
    tests with `&`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The next test finds this process as this one did, whatever this one or a library has set
    meanwhile."""
    environment = dict(os.environ)
    folder = os.getcwd()
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in environment.items() if os.environ.get(name) != value}
    )
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    for number in (
        number for number, handler in handlers.items() if signal.getsignal(number) != handler
    ):
        signal.signal(number, handlers[number])


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the programs megaprec and python of this checkout, which begin without
    importing anything anew."""
    with served(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


@pytest.fixture
def forked_python(forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test starts as `sys.executable` is a forked process: see
    tests/project/forked_command.py."""
    monkeypatch.setattr(sys, "executable", str(forks / "python"))


@pytest.fixture
def alike(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of all cases of this test that this session tries: one world of ranks may
    serve them all."""
    here = request.node.nodeid.partition("[")[0]
    chosen = (item for item in request.session.items if item.nodeid.partition("[")[0] == here)
    return [item.callspec.params for item in chosen if isinstance(item, pytest.Function)]


@pytest.fixture
def torch_files_read_here() -> Iterator[None]:
    """Torch files are looked into without a process for each look, which takes longer than all the
    rest.

    That process itself is tested in test_untrusted.py, and as part of a conversion in
    test_convert.py.
    """

    def answers(paths: Sequence[Path]) -> Any:
        found = [describe_distributed(path) if path.is_dir() else describe(path) for path in paths]
        return json.loads(json.dumps(found))

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # of its own: a test that undoes its patches keeps this one
        patch.setattr(torch_files, "_ask", answers)
        yield
