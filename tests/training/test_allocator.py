"""Freed memory is kept, unless the environment speaks of it."""

import ctypes
from types import SimpleNamespace

import pytest

from tools.training.machine import keep_freed_memory


@pytest.mark.parametrize("name", ["", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_c_library_is_told_unless_the_environment_speaks_for_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("tools.training.machine.sys.platform", "linux")
    monkeypatch.setattr("tools.training.machine.os.environ", {name: "1"} if name else {})
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *numbers: told.append(numbers))
    )
    keep_freed_memory()
    assert told == ([] if name else [(-1, 1 << 30), (-3, 1 << 25)])


def test_a_c_library_without_such_a_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory()
