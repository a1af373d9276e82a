"""A measurement's process is ended with all that it has started, and what it has printed is
known."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tools.bench.child import Child, _pids_with

FAR = 600.0  # seconds: a limit that no machine reaches
# in a session of its own, as a rank is
WITH_RANK = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"],
                        start_new_session=True)
print(rank.pid, flush=True)
time.sleep({seconds})
"""


MakeChild = Callable[[str], Child]


@pytest.fixture
def child() -> Iterator[MakeChild]:
    """Makes the process of a program."""
    with TemporaryFile("a+b") as log:
        yield lambda program: Child([sys.executable, "-c", program], Path.cwd(), log)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    # a process that has ended and that nobody has waited for has state Z
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("seconds", [10**6, 0], ids=["it hangs", "it ends"])
def test_ranks_that_a_measurement_has_started_end_with_it(seconds: int, child: MakeChild) -> None:
    lines = child(WITH_RANK.format(seconds=seconds)).lines(FAR)
    rank = int(next(lines))
    if seconds:
        assert is_running(rank)
        lines.close()  # as when a time limit passes
    else:
        assert [*lines] == []
    assert not is_running(rank)


def test_what_is_printed_is_known_and_why_there_is_no_more(child: MakeChild) -> None:
    hanging = child("print('first'); print('half', end='', flush=True); import time; time.sleep(9)")
    assert [*hanging.lines(0.0)] == []
    assert hanging.reason(7.0) == "not done after 7 s"
    failing = child("print('first'); print('second'); raise ValueError('wrong')")
    assert [*failing.lines(FAR)] == ["first", "second"]
    assert failing.code == 1 and failing.reason(7.0) == "ValueError: wrong"
    killed = child("import os; os.kill(os.getpid(), 9)")
    assert [*killed.lines(FAR)] == []
    assert killed.reason(7.0) == "SIGKILL ended it"


def test_a_process_that_says_nothing_for_too_long_is_ended(child: MakeChild) -> None:
    silent = child("import time; time.sleep(10**6)")
    assert [*silent.lines(FAR, silence=0.3)] == []
    assert silent.code is None


def test_no_other_process_has_the_mark() -> None:
    assert os.getpid() not in {*_pids_with(b"MEGAPREC_MEASUREMENT=none")}
