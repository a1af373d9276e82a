"""What a step reports of its routers, compared with the plain model."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from megaprec.optim.decision.step_report import StepReport

# loads are counts; other numbers are rounded to 2^-30 for each micro-batch
EXACT = ("max_load", "min_load")


def require_routers(report: StepReport, record: Mapping[str, Any]) -> None:
    """The report of a step says of each router, in order, what the plain model's record does."""
    layers = [router.layer for router in report.routers]
    assert layers == sorted({*layers})
    for router, expected in zip(report.routers, record["routers"], strict=True):
        found = asdict(router)
        del found["layer"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            wanted = value
            if value is not None and name not in EXACT:
                wanted = pytest.approx(value, rel=1e-8, abs=1e-9)
            assert found[name] == wanted, (name, router)
