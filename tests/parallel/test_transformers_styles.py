"""Ready styles cut models of transformers so that they train as they are."""

from typing import Any

import pytest
from torch import nn

from parallel.ready_styles import transformers_styles
from tests.ranks import run_ranks
from tests.refusals import raises

pytest.importorskip("transformers", minversion="5", reason="needs transformers: the extra hf")

from tests.parallel.transformers_models import losses, make_model, plain_losses

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("llama", {}),
    ("mistral", {"sliding_window": 4}),
    ("qwen2", {"tie_word_embeddings": True}),
]


@pytest.mark.cases(1, slow=3)
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_model_that_is_cut_by_ready_styles_trains_as_it_is(
    kind: str, changes: dict[str, Any]
) -> None:
    expected = plain_losses(kind, changes)
    assert expected[-1] < expected[0]
    for ours in run_ranks(losses, {"tp": 2}, kind=kind, changes=changes):
        assert ours == pytest.approx(expected, rel=1e-5)


def test_another_family_is_refused_by_name() -> None:
    with raises("parallel.no_styles", family="gpt2"):
        transformers_styles(make_model("gpt2"))
    with raises("parallel.no_styles", family="Sequential"):
        transformers_styles(nn.Sequential())


def test_styles_are_the_same_when_they_are_asked_for_again() -> None:
    model = make_model("qwen3")
    parameters = list(model.parameters())
    styles = transformers_styles(model)
    assert transformers_styles(model) == styles
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
