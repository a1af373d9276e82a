"""What several files of tests ask for by name."""

import gc
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tools.convert.core import torch_files
from tools.convert.core.untrusted import described, distributed, unpickled

# How fast an example is says nothing on a machine that does other things too.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how long each folder of tests took: the sum over its tests, whichever process ran them."""
    seconds, tests = defaultdict[str, float](float), Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            folder = str(Path(report.location[0]).parent)
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    terminalreporter.section("seconds by folder")
    for folder in sorted(seconds):
        terminalreporter.write_line(f"{seconds[folder]:8.1f} s  {tests[folder]:5} tests  {folder}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a test beyond those that `@pytest.mark.cases(fast, slow=None)` gives.

    The first `fast` cases are fast, the next `slow` are slow (all others without `slow`), the rest is for a campaign.
    Cases that are marked slow themselves are not counted as fast.
    """
    used = Counter[tuple[str, str]]()
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark is None or item.get_closest_marker("campaign"):
            continue
        room = {"fast": mark.args[0], "slow": mark.kwargs.get("slow", math.inf), "campaign": math.inf}
        if item.get_closest_marker("slow"):
            del room["fast"]
            item.own_markers[:] = [one for one in item.own_markers if one.name != "slow"]
        name = item.nodeid.partition("[")[0]
        kind = next(kind for kind, most in room.items() if used[name, kind] < most)
        used[name, kind] += 1
        if kind != "fast":
            item.add_marker(kind)


def pytest_collection_finish() -> None:
    """Takes the modules that are imported by now out of garbage collection, as tests/frozen.py does in ranks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine remembers of token files is not what the user's own account remembers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def torch_files_read_here() -> Iterator[None]:
    """Torch files are looked into without a process for each look, which takes longer than all the rest.

    That process itself is tested in test_untrusted.py, and as part of a conversion in test_convert.py.
    """

    def answers(paths: Sequence[Path]) -> Any:
        found = [distributed(path) if path.is_dir() else described(unpickled(path)) for path in paths]
        return json.loads(json.dumps(found))

    with pytest.MonkeyPatch.context() as patch:  # of its own: a test that undoes its patches keeps this one
        patch.setattr(torch_files, "_ask", answers)
        yield
