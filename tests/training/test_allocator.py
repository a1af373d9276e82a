"""Freed memory is kept, and few kernels of products are, unless the environment speaks of it."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tools.training.machine import PRODUCT_CACHES, bound_product_caches, keep_freed_memory

MIB = 1 << 20
# prints the bytes that products of many numbers of rows leave in memory
PRODUCTS = """
import torch
from megaprec.resources import peak_memory
from tools.training.machine import bound_product_caches

bound_product_caches()
weight = torch.ones(512, 256, dtype=torch.bfloat16)
torch.nn.functional.linear(weight, weight)
before = peak_memory()
for rows in range(1, 400):
    torch.nn.functional.linear(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
print(peak_memory() - before)
"""


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


@pytest.mark.slow
def test_products_of_any_numbers_of_rows_leave_little_in_memory() -> None:
    environment = {name: v for name, v in os.environ.items() if name not in PRODUCT_CACHES}
    command = [sys.executable, "-c", PRODUCTS]
    ended = subprocess.run(
        command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True
    )
    # without a bound 260 MiB
    assert int(ended.stdout) < 128 * MIB


def test_the_environment_may_say_how_many_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PRODUCT_CACHES
    monkeypatch.setattr("tools.training.machine.os.environ", {first: "7"})
    bound_product_caches()
    assert os.environ[first] == "7"
    assert second in os.environ
