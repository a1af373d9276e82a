"""The counts of docs/gpu.md are those of the code: python -m tests.models.counted_page prints
them."""

import pytest

from tests.models.counted_page import PEAK, Estimate, lines
from tests.project.test_readme import ROOT


@pytest.mark.slow
def test_the_page_has_the_counts_of_the_code() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    tables = "\n".join(lines()).split("\n\n")
    assert [table for table in tables if table not in page] == []


def test_a_step_at_the_peak_has_an_mfu_of_one() -> None:
    assert Estimate(seconds=2.0, flops=2 * PEAK).mfu == 1
