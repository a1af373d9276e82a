"""Processes that read files of unknown origin are limited in one place."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megaprec.text import limits
from tests.project.test_readme import ROOT

LIMITED = ("megaprec/text/confined_program.py", "megaprec/text/tokenizer_trial.py", "tools/convert/core/untrusted.py")  # fmt: skip


def test_limits_of_a_process_that_reads_files_are_set_by_one_function() -> None:
    setting = {
        str(path.relative_to(ROOT))
        for room in ("megaprec", "parallel", "models", "tools")
        for path in (ROOT / room).rglob("*.py")
        if "resource.setrlimit" in path.read_text()
    }
    # the launcher raises the number of open files
    assert setting == {"megaprec/text/limits.py", "tools/training/launch.py"}
    for program in LIMITED:
        assert "limit_process(" in (ROOT / program).read_text()


KINDS: tuple[str, ...] = ("AS", "CPU", "FSIZE", "CORE", "NPROC")
ASK = """import resource, runpy
limit_process = runpy.run_path({path!r})["limit_process"]
{before}
limit_process({arguments})
for kind in ("AS", "CPU", "FSIZE", "CORE", "NPROC"):
    print(*resource.getrlimit(getattr(resource, f"RLIMIT_{{kind}}")))
"""


@pytest.mark.parametrize(
    ("arguments", "before", "expected"),
    [
        ("1 << 30, 7, may_start_others=False", "", {"CPU": 7, "FSIZE": 0, "CORE": 0, "NPROC": 0}),
        ("1 << 30", "", {"FSIZE": 0, "CORE": 0}),
        ("1 << 30, 7", "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))", {"CPU": 5, "FSIZE": 0}),
    ],
)
def test_a_process_has_the_limits_that_are_stated_and_never_more_than_the_users(
    arguments: str, before: str, expected: dict[str, int]
) -> None:
    program = ASK.format(path=limits.__file__, arguments=arguments, before=before)
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    found: dict[str, list[str]] = dict(zip(KINDS, rows, strict=True))
    for kind, most in expected.items():
        assert found[kind] == [str(most), str(most)]
    if Path("/proc/self/statm").exists():
        assert 1 << 30 < int(found["AS"][0]) < 2 << 30
    if "CPU" not in expected:
        assert int(found["CPU"][0]) == resource.getrlimit(resource.RLIMIT_CPU)[0]
