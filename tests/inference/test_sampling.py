"""The tokens that may be chosen, and their probabilities, are those of transformers; draws follow
them."""

from typing import Any

import pytest
import torch

from tests.refusals import raises
from tools.inference.sampling import Sampling

VOCAB = 50
SETTINGS = [
    Sampling(1.0, 0),
    Sampling(0.7, 5),
    Sampling(1.3, 500),
    Sampling(1.0, 0, top_p=0.8),
    Sampling(1.0, 0, top_p=1e-6),
    Sampling(2.0, 0, min_p=0.3),
    Sampling(1.0, 0, min_p=1.0),
    Sampling(1.5, 20, top_p=0.7, min_p=0.2),
]


def some_logits(seed: int) -> torch.Tensor:
    return (
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    )


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_candidates_are_those_of_transformers(sampling: Sampling) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="needs transformers: the extra hf"
    )
    warpers = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [transformers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for seed in range(20):
        logits = some_logits(seed)
        theirs = transformers.LogitsProcessorList(warpers)(
            torch.zeros(1, 1, dtype=torch.int64), logits[None]
        )
        expected = theirs.softmax(-1)[0]
        ids, probabilities = sampling.candidates(logits)
        ours = torch.zeros_like(logits)
        ours[ids] = probabilities
        assert len(ids) == int((expected > 0).sum()) > 0
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_draws_come_as_often_as_their_probability() -> None:
    sampling = Sampling(1.0, 4)
    logits = some_logits(1)
    ids, probabilities = sampling.candidates(logits)
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    drawn = torch.tensor([sampling.choose(logits, generator) for _ in range(draws)])
    often = torch.stack([(drawn == id).double().mean() for id in ids])
    spread = (probabilities * (1 - probabilities) / draws).sqrt()
    assert ((often - probabilities).abs() < 4 * spread).all() and abs(
        often.sum().item() - 1
    ) < 1e-12


def test_temperature_zero_is_the_likeliest_and_so_is_the_smallest_above() -> None:
    logits = some_logits(3).float()
    generator = torch.Generator().manual_seed(0)
    likeliest = int(logits.argmax())
    for temperature in (0.0, 5e-324, 1e-45, 1e-30, 1e-6):
        assert Sampling(temperature, 0).choose(logits, generator) == likeliest


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = some_logits(0)
    logits[7] = bad
    with raises("text.not_finite"):
        Sampling(temperature).choose(logits, torch.Generator())


def test_what_a_model_says_of_the_choice_and_is_not_done_is_named() -> None:
    said = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "suppress_tokens": [3],
        "odd": "x",
    }
    ids = {
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "transformers_version": "5",
        "do_sample": True,
        "max_length": 20,
    }
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "penalty": None,
    }
    assert Sampling().not_followed(said | ids) == said
    assert Sampling().not_followed(neutral | ids) == {}
    assert Sampling(0.6, 50, 0.9).not_followed(said).keys() == {
        "repetition_penalty",
        "suppress_tokens",
        "odd",
    }
    assert Sampling().not_followed({"top_k": 1, "temperature": 0}) == {"top_k": 1, "temperature": 0}
