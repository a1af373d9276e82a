"""Which samples of an evaluated batch count, and what a sentinel checks and may expect of a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.engine.passes import Share
from tools.training import step_records
from tools.training.batches import Batches
from tools.training.step_records import SentinelChecks


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("first", "end", "counts"), [(0, 8, 4), (4, 8, 4), (4, 7, 3), (4, 5, 1), (0, 4, 4)]
)
def test_a_sample_from_the_end_on_fills_a_batch_of_four_and_does_not_count(
    rank: int, first: int, end: int, counts: int
) -> None:
    """Two ranks have two samples each; a batch of which all samples count has no mask."""

    def read(samples: object, first_sample: int, size: int, replica: int) -> Share:
        ids = torch.zeros(2, 3, dtype=torch.int64)
        return Share(ids, ids, first=2 * replica)

    batches: Any = SimpleNamespace(
        _position=SimpleNamespace(note_action=lambda words: None),
        _read=read,
        _evaluated_size=4,
        _dp=SimpleNamespace(rank=rank),
    )
    samples: Any = None
    share = Batches.evaluation_share(batches, samples, first, end)
    if counts == 4:
        assert share.mask is None
        return
    wanted = [float(2 * rank + sample < counts) for sample in range(2)]
    assert share.mask is not None
    assert share.mask.tolist() == [[weight] * 3 for weight in wanted]


@pytest.mark.parametrize(
    ("device", "factory", "exact"),
    [
        ("cpu", "", True),
        ("cpu", "my:model", False),
        ("meta", "", False),
        ("meta", "my:model", False),
    ],
)
def test_a_sentinel_expects_the_same_bits_of_our_own_models_on_a_cpu_alone(
    device: str, factory: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(
        step_records.optional_parts, "Sentinel", lambda engine, exact: made.append(exact)
    )
    engine: Any = SimpleNamespace(device=torch.device(device))
    config: Any = SimpleNamespace(
        model=SimpleNamespace(factory=factory), train=SimpleNamespace(sentinel=1)
    )
    SentinelChecks(engine, config)
    assert made == [exact]


@pytest.mark.parametrize(("every", "checked"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (0, [])])
def test_a_sentinel_checks_each_so_many_steps_and_no_other_is_called_clean(
    every: int, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []

    class Looking:
        recomputes = True

        def __init__(self, *given: object) -> None:
            pass

        @contextmanager
        def checking(self, number: int, share_of: object) -> Iterator[None]:
            yield
            looked_at.append(number + 1)

    monkeypatch.setattr(step_records.optional_parts, "Sentinel", Looking)
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    config: Any = SimpleNamespace(
        model=SimpleNamespace(factory=""), train=SimpleNamespace(sentinel=every)
    )
    checks = SentinelChecks(engine, config)
    clean: list[int] = []
    for step in range(1, 8):
        with checks.checking(step - 1, lambda replica: pytest.fail("not asked for")):
            pass
        if checks.note_clean(step) == {"sentinel": "clean"}:
            clean.append(step)
    assert looked_at == clean == checked
