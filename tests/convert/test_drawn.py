"""Odd models of every family: from transformers to ours and back with the same logits, or one line
refuses."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.errors import UserError
from tests.convert.drawn import drawn
from tools.cli import main
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.families import FAMILIES

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
SEEDS = range(660)
LENGTH = 30
BOUND = 1e-5  # of the largest difference, relative to the largest logit


def made(config: dict[str, Any]) -> Any:
    """Return transformers' model of a configuration, whose every tensor matters."""
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            values.copy_(0.3 * torch.randn(values.shape, generator=dice) + float(is_norm))
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.copy_(0.1 * torch.randn(values.shape, generator=dice))
            if name.endswith("layer_scalar"):
                values.copy_(0.5 + torch.rand(values.shape, generator=dice))
    return model.eval()


def loaded(folder: Path) -> Any:
    settings = transformers.AutoConfig.from_pretrained(folder)
    settings._experts_implementation = (
        "eager"  # torch's grouped products know only widths of 16 bytes
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=settings,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits_of(model: Any, vocab: int) -> Tensor:
    ids = torch.randint(vocab, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    # a cache would need a layer with attention
    return model(ids, use_cache=False).logits


@pytest.mark.cases(2, sample=2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_model_comes_back_with_the_same_logits_or_one_line_refuses(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every fifth is saved as transformers 5 holds it, with the experts of a layer in one
    tensor."""
    config = drawn(seed)
    model = made(config)
    expected = logits_of(model, config["vocab_size"])
    model.save_pretrained(tmp_path / "hf", save_original_format=seed % 5 > 0)
    capsys.readouterr()  # how far transformers was
    for first, second, to in (("hf", "ours", "megaprec"), ("ours", "back", "hf")):
        code = main(["convert", str(tmp_path / first), str(tmp_path / second), "--to", to])
        if code:
            problems = capsys.readouterr().err.strip()
            assert code == 2 and "\n" not in problems, problems
            return
    found = logits_of(loaded(tmp_path / "back"), config["vocab_size"])
    assert ((found - expected).abs().max() / expected.abs().max()).item() < BOUND, json.dumps(
        config
    )


def test_most_drawn_models_of_each_family_are_read() -> None:
    """A refusal is a right answer, but not to all of them."""
    read = Counter[str]()
    for seed in SEEDS:
        config = drawn(seed)
        with suppress(UserError):
            from_hugging_face(config)
            read[config["model_type"]] += 1
    turns = len(SEEDS) // len(FAMILIES)
    assert min(read[kind] for kind in FAMILIES) > turns // 3, read


def test_families_take_turns() -> None:
    assert {drawn(seed)["model_type"] for seed in SEEDS[: len(FAMILIES)]} == FAMILIES.keys()
