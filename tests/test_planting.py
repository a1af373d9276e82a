"""Faults that campaigns plant can be planted: what they replace is there, and is called as what
takes its place."""

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.models.test_canonical_mutations import MUTATIONS
from tests.parity.fault_table import FAULTS
from tests.planting import callable_alike, put
from tests.ranks import run_ranks


class Layer:
    """Something to plant faults in."""

    def forward(self, x: int, *, by: int = 2) -> int:
        return x * by

    @staticmethod
    def backward(grad: int) -> int:
        return grad


def failures(mesh: DeviceMesh) -> dict[str, str]:
    """Why faults cannot be planted, by name."""
    found: dict[str, str] = {}
    plants = {name: fault.plant for name, fault in FAULTS.items()} | {
        n: m[2] for n, m in MUTATIONS.items()
    }
    for name, plant in plants.items():
        try:
            plant()
        except (AssertionError, AttributeError, TypeError) as error:
            found[name] = str(error)
    return {**found, "planted": str(len(plants) - len(found))}


def test_every_fault_replaces_something_that_is_called_alike() -> None:
    (found,) = run_ranks(failures, {"dp": 1})
    assert int(found.pop("planted")) > 80
    assert found == {}


@pytest.mark.parametrize(
    ("name", "what", "fits"),
    [
        ("forward", lambda self, x, by=3: x, True),
        ("forward", lambda *given, **named: 1, True),
        ("forward", lambda self, x, by, more: x, False),
        ("forward", lambda self: 1, False),
        # callers may give the argument that has a default
        ("forward", lambda self, x: x, False),
        ("backward", staticmethod(lambda grad: 0), True),
        ("backward", staticmethod(lambda ctx, grad: 0), False),
    ],
)
def test_what_its_callers_could_not_call_is_not_planted(name: str, what: Any, fits: bool) -> None:
    assert callable_alike(Layer.__dict__[name], what) == fits


def test_what_replaces_nothing_is_not_planted() -> None:
    with pytest.raises(AssertionError, match="has no forwards"):
        put(Layer, "forwards", lambda self, x: x)
