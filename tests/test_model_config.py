"""What a model description counts, against published models and counts by hand."""

import pytest
from pydantic import ValidationError

from megaprec.errors import UserError
from models.config import ModelConfig
from models.presets import PRESETS, preset


@pytest.mark.parametrize(("name", "parameters"), [("gpt2", 124_439_808), ("llama2-7b", 6_738_415_616)])
def test_presets_have_exactly_the_parameters_of_the_published_models(name: str, parameters: int) -> None:
    assert preset(name).num_parameters == parameters


def test_parameters_follow_every_switch() -> None:
    plain = ModelConfig(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=6, ffn=16, vocab=10)
    weights = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16  # q, k and v, output, gated feed-forward
    assert plain.num_parameters == 2 * (weights + 2 * 8) + 8 + 2 * 10 * 8
    biased = plain.model_copy(update={"bias": True})
    assert biased.num_parameters - plain.num_parameters == 2 * (24 + 2 * 12 + 8 + 2 * 16 + 8)
    assert plain.model_copy(update={"norm": "layer"}).num_parameters - plain.num_parameters == 2 * 2 * 8 + 8
    assert plain.num_parameters - plain.model_copy(update={"tied": True}).num_parameters == 10 * 8
    learned = plain.model_copy(update={"positions": "learned", "max_positions": 7})
    assert learned.num_parameters - plain.num_parameters == 7 * 8
    assert plain.num_parameters - plain.model_copy(update={"mlp": "gelu"}).num_parameters == 2 * 8 * 16


def test_flops_are_two_per_weight_that_multiplies_plus_attention_over_the_whole_sequence() -> None:
    model = preset("gpt2", bias=False)
    weights = 12 * 768 * 768  # of one block: 4 for attention, 8 for the feed-forward
    assert model.layer_flops(seq_length=100) == 2 * weights + 2 * 2 * 100 * 768
    assert model.head_flops() == 2 * 768 * 50257
    assert model.flops_per_token(100) == 12 * model.layer_flops(100) + model.head_flops()


def test_a_family_chooses_the_switches_and_any_of_them_can_be_changed() -> None:
    llama, gpt2 = preset("llama-demo"), preset("gpt2", norm="rms")
    assert (llama.norm, llama.positions, llama.mlp, llama.bias, llama.tied) == ("rms", "rope", "swiglu", False, False)
    assert (gpt2.norm, gpt2.positions, gpt2.mlp, gpt2.bias, gpt2.tied) == ("rms", "learned", "gelu", True, True)


def test_sizes_not_given_follow_from_those_that_are() -> None:
    model = ModelConfig(layers=1, hidden=256, heads=8)
    assert (model.kv_heads, model.head_dim, model.ffn) == (8, 32, 704)  # 8/3 * 256 = 682.7, up to 11 * 64
    assert ModelConfig(layers=1, hidden=192, heads=8).ffn == 512  # 8/3 * 192 is a multiple already
    assert ModelConfig(family="gpt2", layers=1, hidden=256, heads=8).ffn == 1024


def test_sizes_that_do_not_fit_are_reported_together() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig(layers=1, hidden=100, heads=6, kv_heads=4)
    assert "hidden 100 is not a multiple of heads 6" in str(caught.value)
    assert "kv_heads 4 does not divide heads 6: 1, 2, 3, 6 would" in str(caught.value)
    with pytest.raises(ValidationError, match="head_dim 5: rotary"):
        ModelConfig(layers=1, hidden=20, heads=4)
    assert ModelConfig(family="gpt2", layers=1, hidden=20, heads=4).head_dim == 5  # learned positions turn nothing


def test_with_vocab_changes_only_the_vocabulary() -> None:
    demo = preset("llama-demo")
    assert demo.vocab == 0
    assert demo.with_vocab(77) == demo.model_copy(update={"vocab": 77})
    with pytest.raises(ValidationError):
        demo.with_vocab(-1)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=", ".join(PRESETS)):
        preset("gpt5")
