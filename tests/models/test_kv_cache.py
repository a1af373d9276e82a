"""A text continued with kept keys and values has the logits of the whole text computed again."""

from itertools import accumulate

import pytest
import torch

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.decoder.stages import Stage
from parallel.context import Context
from tests.families import CASES, config_of
from tests.refusals import raises
from tests.work import flops_of

# they cross windows and the original lengths of scaled positions
PIECES = [
    5,
    1,
    1,
    3,
    1,
    1,
    1,
    1,
    1,
    1,
]


def both(config: ModelConfig, compute: str = "fp64") -> tuple[Stage, CachedStage]:
    """The same lively random model without and with a cache."""
    cut = cuts(config, 1, config.max_positions)[0]
    plain = Stage(config, Context(plan(compute)), cut)
    cached = CachedStage(config, Context(plan(compute)), cut)
    generator = torch.Generator().manual_seed(2)
    for parameter in plain.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    cached.load_state_dict(plain.state_dict())
    return plain, cached


@pytest.mark.cases(18, sample=6)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_with_the_cache_are_those_without_it(case: str) -> None:
    config = config_of(CASES[case])
    plain, cached = both(config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):  # the second text finds nothing of the first
        ids = torch.randint(config.vocab, (config.max_positions, 3), generator=generator)
        cached.start(len(ids), 3)
        for piece, end in zip(ids.split(PIECES), accumulate(PIECES), strict=True):
            torch.testing.assert_close(
                cached.extend(piece), plain(ids[:end])[-1], rtol=0, atol=1e-12
            )


@torch.no_grad()
def test_keys_are_kept_in_the_dtype_of_the_products() -> None:
    plain, cached = both(config_of(CASES["qwen3"]), "bf16")
    ids = torch.randint(97, (9, 1), generator=torch.Generator().manual_seed(1))
    cached.start(9)
    cached.extend(ids[:8])
    apart = (cached.extend(ids[8:]) - plain(ids)[-1]).abs().max()
    assert apart < 0.02 * plain(ids).abs().max()


def test_positions_that_the_model_has_not_are_refused() -> None:
    _, cached = both(config_of(CASES["llama"]))
    with raises("model.too_many_positions", capacity=17, max_positions=16):
        cached.start(17)
    cached.start(4)
    cached.extend(torch.zeros(4, 1, dtype=torch.int64))
    with raises("model.cache_full", num_tokens=5, capacity=4):
        cached.extend(torch.zeros(1, 1, dtype=torch.int64))


@torch.no_grad()
def test_a_token_after_512_others_takes_a_hundredth_of_the_whole_text_at_most() -> None:
    plain, cached = both(
        ModelConfig(layers=4, hidden=256, heads=8, vocab=512, max_positions=544), "fp32"
    )
    ids = torch.randint(512, (512, 1), generator=torch.Generator().manual_seed(1))
    cached.start(544)
    cached.extend(ids)
    kept = flops_of(lambda: cached.extend(ids[:1]))
    again = flops_of(lambda: plain(ids))
    assert 100 * kept < again, (kept, again)
