"""The tests of FP8 are tested: each well-known bug is put in on purpose, and the law that is there
for it must fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.checkpoint import save_load as checkpoint_state
from megaprec.checkpoint.save_load import save
from megaprec.fp8 import quantize as quantize_module
from megaprec.fp8.history import AmaxHistory
from megaprec.fp8.state import FP8State
from tests.fp8.test_state import require_fresh_casts, require_saturation
from tests.fp8.test_training import (
    FIRST,
    POWERS,
    engine_of,
    fp8,
    require_evaluation_leaves_the_state,
    require_margin,
    require_one_scale,
    require_taken_up,
    run,
)

pytestmark = pytest.mark.slow


def the_margin_raises_scales(patch: pytest.MonkeyPatch) -> None:
    inner = AmaxHistory.__init__

    def made(self: AmaxHistory, recipe: Any, *others: Any) -> None:
        inner(self, replace(recipe, margin=-recipe.margin), *others)

    patch.setattr(AmaxHistory, "__init__", made)


def evaluations_record(patch: pytest.MonkeyPatch) -> None:
    inner = FP8State._entered
    patch.setattr(FP8State, "_entered", lambda self, enabled, records: inner(self, enabled, True))


def casts_of_weights_live_on(patch: pytest.MonkeyPatch) -> None:
    def cast_of(
        self: FP8State, name: str, weight: Tensor, moment: int, make: Callable[[], Any]
    ) -> Any:
        if name not in self._casts:
            self._casts[name] = (0, 0), make()
        return self._casts[name][1]

    patch.setattr(FP8State, "cast_of", cast_of)


def versions_are_not_counted_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("megaprec.optim.state.flat_buffer.increment_version", lambda parameters: None)


def casts_do_not_saturate(patch: pytest.MonkeyPatch) -> None:
    def cast(values: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
        scaled = values.float() * scale
        return scaled.masked_fill(scaled.abs() > torch.finfo(dtype).max, torch.nan).to(dtype)

    patch.setattr(quantize_module, "cast", cast)


def amaxes_stay_on_a_tensor_rank() -> None:
    FP8State._reduce_max = lambda self, amaxes: None


LAWS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (the_margin_raises_scales, lambda: require_margin(2)),
    (evaluations_record, require_evaluation_leaves_the_state),
    (casts_of_weights_live_on, require_fresh_casts),
    (versions_are_not_counted_up, require_fresh_casts),
    (casts_do_not_saturate, require_saturation),
]


@pytest.mark.parametrize(("bug", "law"), LAWS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_known_bug_breaks_its_law(bug: Any, law: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    law()
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        law()


def test_amaxes_that_stay_on_a_tensor_rank_are_noticed() -> None:
    with pytest.raises(AssertionError):
        require_one_scale(
            {"tp": 2},
            *(replace(one, before=amaxes_stay_on_a_tensor_rank) for one in (POWERS, FIRST)),
        )


def test_a_history_that_is_lost_on_load_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(run(fp8()))
    save(tmp_path, 1, engine.optimizer, {}, fp8=engine.fp8)
    require_taken_up(tmp_path, engine)
    monkeypatch.setattr(checkpoint_state, "take_up", lambda found, rolls, state: None)
    with pytest.raises(AssertionError):
        require_taken_up(tmp_path, engine)
