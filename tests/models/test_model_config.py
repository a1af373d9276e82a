"""What a model description counts, against published models and counts by hand."""

import re
from math import prod
from typing import Any

import pytest
from pydantic import ValidationError

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from models.parameter_counts import num_parameters
from models.presets import PRESETS, preset
from parallel.context import Context
from tests.families import CASES, config_of
from tests.refusals import sentence, shows

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-14m": 14_067_712,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    # the text models; their files have images and multi-token prediction besides
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "glm-4.5": 352_797_829_024,  # its file has 358 B, with a layer for multi-token prediction
    "glm-4.5-air": 106_852_251_264,  # 110 B with that layer
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,  # 74 rows of embedding and head fewer than OLMo 2's
    "olmo3-32b": 32_233_522_176,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # 671B, without the 14B of the layer for multi-token prediction
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # the text model; without embedding 3,209 M, as the technical report says
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,  # likewise 10,759 M
    "gemma3-27b": 27_009_346_304,  # likewise 25,600 M
    "nemotron-h-4b": 4_489_223_040,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-h-47b": 46_791_554_816,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-nano-12b-v2": 12_310_001_152,
    # 31.6 B, of which a token passes 3.6 B with embedding and head, as its report says
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    # as its published files count, with the corrections of routers
    "kimi-linear-48b-a3b": 49_122_681_728,
    # with the number of each layer, which transformers does not count; 30.7 B, as its card says
    "gemma4-12b": 11_907_350_320,
    "gemma4-31b": 30_697_345_340,
    "seed-oss-36b": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
    # 1.07 B and 30.95 B without embedding and head, as their card says
    "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384,
    # 0.36 B, as its card says
    "ernie-4.5-0.3b": 360_748_032,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "command-r7b": 8_028_033_024,
    "nanochat-d32": 1_879_048_192,
    # with the two numbers of each activation
    "apertus-8b": 8_053_338_176,
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": 8_489_553_920,
    "olmoe-1b-7b": 6_919_161_856,
    "minimax-m2": 228_689_764_864,
    "dots.llm1": 142_774_381_696,
    "glm-4.7-flash": 29_943_393_920,  # without the layer for multi-token prediction
    "solar-open-100b": 102_651_799_552,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_exactly_the_parameters_of_the_published_models(name: str) -> None:
    if name.endswith("-demo"):
        # published by nobody, for a laptop
        assert 5e6 < num_parameters(preset(name).with_vocab(4096)) < 7e6
    else:
        assert num_parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_as_many_parameters_as_its_description_says(name: str) -> None:
    config = config_of(CASES[name])
    stage = Stage(config, Context(plan()), Cut(0, range(config.layers), first=True, last=True))
    parts = {part for parameter in stage.parameters() for part in layout_of(parameter).parts}
    assert sum(prod(part.shape) for part in parts) == num_parameters(config)


def test_parameters_follow_every_switch() -> None:
    plain = ModelConfig(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=6, ffn=16, vocab=10)
    weights = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16  # q, k and v, output, gated feed-forward
    assert num_parameters(plain) == 2 * (weights + 2 * 8) + 8 + 2 * 10 * 8
    for bias, size in {"qkv_bias": 24 + 2 * 12, "output_bias": 8, "mlp_bias": 2 * 16 + 8}.items():
        assert (
            num_parameters(plain.model_copy(update={bias: True})) - num_parameters(plain)
            == 2 * size
        )
    assert (
        num_parameters(plain.model_copy(update={"qk_norm": True})) - num_parameters(plain)
        == 2 * 2 * 6
    )
    many = plain.model_copy(update={"experts": 5})
    assert num_parameters(many) - num_parameters(plain) == 2 * (4 * 3 * 8 * 16 + 5 * 8)
    assert (
        num_parameters(plain.model_copy(update={"norm": "layer", "norm_bias": True}))
        - num_parameters(plain)
        == 2 * 2 * 8 + 8
    )
    without_biases = plain.model_copy(update={"norm": "layer", "norm_bias": False})
    assert num_parameters(without_biases) == num_parameters(plain)
    assert num_parameters(plain) - num_parameters(plain.model_copy(update={"tied": True})) == 10 * 8
    learned = plain.model_copy(update={"positions": "learned", "max_positions": 7})
    assert num_parameters(learned) - num_parameters(plain) == 7 * 8
    assert (
        num_parameters(plain) - num_parameters(plain.model_copy(update={"mlp": "gelu"}))
        == 2 * 8 * 16
    )


def test_flops_are_two_per_weight_that_multiplies_plus_attention_over_the_whole_sequence() -> None:
    model = preset("gpt2", bias=False)
    weights = 12 * 768 * 768  # of one block: 4 for attention, 8 for the feed-forward
    assert model.layer_flops(seq_length=100) == 2 * weights + 2 * 2 * 100 * 768
    assert model.head_flops() == 2 * 768 * 50257
    assert model.flops_per_token(100) == 12 * model.layer_flops(100) + model.head_flops()


def test_flops_count_the_experts_of_a_token_the_router_and_the_window() -> None:
    plain = ModelConfig(layers=2, hidden=8, heads=4, ffn=16, vocab=10)
    sparse = plain.model_copy(update={"experts": 5, "experts_per_token": 3})
    assert sparse.layer_flops(7) - plain.layer_flops(7) == 2 * (2 * 3 * 8 * 16 + 5 * 8)
    window = plain.model_copy(update={"window": 3})
    assert plain.layer_flops(7) - window.layer_flops(7) == 4 * (7 - 3) * 8
    assert window.layer_flops(2) == plain.layer_flops(2)


def test_a_bias_is_everywhere_or_where_it_is_asked_for() -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 2}

    def biases(**switches: Any) -> tuple[bool, bool, bool]:
        model = ModelConfig(**sizes, **switches)
        return model.qkv_bias, model.output_bias, model.mlp_bias

    assert biases() == (False, False, False)
    assert biases(bias=True) == biases(family="gpt2") == (True, True, True)
    assert biases(family="qwen2") == biases(qkv_bias=True) == (True, False, False)
    assert biases(family="gpt_neox", qkv_bias=False, output_bias=False) == (False, False, True)


def test_a_family_chooses_the_switches_and_any_of_them_can_be_changed() -> None:
    llama = preset("llama-demo")
    gpt2 = preset("gpt2", norm="rms")
    assert (llama.norm, llama.positions, llama.mlp, llama.bias, llama.tied) == (
        "rms",
        "rope",
        "swiglu",
        False,
        False,
    )
    assert (gpt2.norm, gpt2.positions, gpt2.mlp, gpt2.bias, gpt2.tied) == (
        "rms",
        "learned",
        "gelu",
        True,
        True,
    )


def test_sizes_not_given_follow_from_those_that_are() -> None:
    model = ModelConfig(layers=1, hidden=256, heads=8)
    # 8/3 * 256 = 682.7, up to 11 * 64
    assert (model.kv_heads, model.head_dim, model.ffn) == (
        8,
        32,
        704,
    )
    assert ModelConfig(layers=1, hidden=192, heads=8).ffn == 512  # 8/3 * 192 is a multiple already
    assert ModelConfig(family="gpt2", layers=1, hidden=256, heads=8).ffn == 1024
    assert ModelConfig(layers=1, hidden=256, heads=8, head_dim=0) == model


def test_sizes_that_do_not_fit_are_reported_together() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig(layers=1, hidden=100, heads=6, kv_heads=4)
    assert shows(str(caught.value), "model.hidden_not_multiple", hidden=100, heads=6)
    assert shows(
        str(caught.value), "model.kv_heads_not_divisor", kv_heads=4, heads=6, divisors="1, 2, 3, 6"
    )
    with pytest.raises(
        ValidationError, match=sentence("model.hidden_not_multiple", hidden=100, heads=6)
    ):
        ModelConfig(layers=1, hidden=100, heads=6, head_dim=0)
    # learned positions turn nothing
    assert ModelConfig(family="gpt2", layers=1, hidden=20, heads=4).head_dim == 5


SCALED = {"kind": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("switches", "problem"),
    [
        (
            {"head_dim": 5},
            sentence("model.rotary_dims", head_dim=5, rotary_dims=5, part="all of it"),
        ),
        (
            {"rotary_fraction": 0.4},
            sentence("model.rotary_dims", head_dim=8, rotary_dims=3, part="0.4 of it"),
        ),
        (
            {"rotary_fraction": 0.1},
            sentence("model.rotary_dims", head_dim=8, rotary_dims=0, part="0.1 of it"),
        ),
        (
            {"positions": "learned", "rope_scaling": SCALED},
            sentence("model.rotary_keys_unused"),
        ),
        (
            {"positions": "learned", "rotary_fraction": 0.5},
            sentence("model.rotary_keys_unused"),
        ),
        (
            {"experts": 4, "experts_per_token": 5},
            sentence("model.experts_per_token", experts_per_token=5, experts=4),
        ),
        (
            {"experts": 4, "bias": True},
            sentence("model.mlp_bias_of_experts", experts=4),
        ),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}},
            sentence(
                "model.rope_key_missing", name="original_max_position_embeddings", kind="yarn"
            ),
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            sentence(
                "model.rope_key_unused",
                name="factor",
                value="2.0",
                kind="none",
                parameters=re.compile("no other key"),
            ),
        ),
        (
            {"rope_scaling": {**SCALED, "mscale": 2.0}},
            sentence(
                "model.rope_key_unused",
                name="mscale",
                value="2.0",
                kind="linear",
                parameters="factor",
            ),
        ),
        ({"rope_scaling": {**SCALED, "factor": 0.5}}, "greater than or equal to 1"),
        (
            {
                "head_dim": 2,
                "rope_scaling": {
                    **SCALED,
                    "kind": "dynamic",
                    "original_max_position_embeddings": 4,
                },
            },
            sentence("model.dynamic_one_pair"),
        ),
        (
            {"rope_scaling": {**SCALED, "kind": "llama3", "low_freq_factor": 4.0}},
            sentence("model.rope_freq_factors", high="4.0"),
        ),
        (
            {"rope_scaling": {**SCALED, "kind": "yarn", "beta_slow": 32.0}},
            sentence("model.rope_betas", fast="32.0"),
        ),
    ],
)
def test_switches_that_do_not_fit_are_refused_in_plain_words(
    switches: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        ModelConfig(**{"layers": 1, "hidden": 32, "heads": 4, **switches})


def test_with_vocab_changes_only_the_vocabulary() -> None:
    demo = preset("llama-demo")
    assert demo.vocab == 0
    assert demo.with_vocab(77) == demo.model_copy(update={"vocab": 77})
    with pytest.raises(ValidationError):
        demo.with_vocab(-1)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=", ".join(PRESETS)):
        preset("gpt5")


def test_the_widths_of_feed_forwards_are_those_that_the_model_has() -> None:
    dense = ModelConfig(vocab=8, hidden=8, layers=2, heads=2, ffn=16, max_positions=8)
    experts = {"experts": 4, "experts_per_token": 2}
    assert dense.ffn_widths == {"ffn": 16}
    assert dense.model_copy(update=experts).ffn_widths == {"ffn": 16}
    shared = dense.model_copy(update={**experts, "shared_experts": 24})
    assert shared.ffn_widths == {"ffn": 16, "shared_experts": 24}
    first_dense = {"dense_layers": (0,), "dense_ffn": 32}
    both = shared.model_copy(update=first_dense)
    assert both.ffn_widths == {"ffn": 16, "dense_ffn": 32, "shared_experts": 24}


def test_ranks_share_what_a_module_that_looks_ahead_projects_to() -> None:
    """Heads and the feed-forward have even shares for four ranks, the residual stream has not."""
    keys: dict[str, Any] = {
        "hidden": 30,
        "heads": 4,
        "head_dim": 8,
        "ffn": 32,
        "layers": 1,
        "vocab": 64,
    }
    config = ModelConfig(family="llama", **keys)
    assert config.fits_tensor(4)
    ahead = config.model_copy(update={"mtp_layers": 1})
    assert [ranks for ranks in (1, 2, 4) if ahead.fits_tensor(ranks)] == [1, 2]


def test_ranks_share_the_heads_of_layers_with_and_without_the_window() -> None:
    """A head is one rank's, or ranks are one head's."""
    keys: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 32, "layers": 1}
    config = ModelConfig(family="llama", vocab=64, **keys)
    fits = {
        number: config.model_copy(update={"global_kv_heads": number}).fits_tensor(2)
        for number in (0, 1, 2, 3)
    }
    assert fits == {0: True, 1: True, 2: True, 3: False}


@pytest.mark.parametrize(
    "own", [{}, {"global_head_dim": 48}, {"global_kv_heads": 1}, {"global_key_as_value": True}]
)
def test_any_key_of_global_heads_gives_layers_without_the_window_heads_of_their_own(
    own: dict[str, Any],
) -> None:
    config = ModelConfig(family="llama", layers=1, hidden=32, heads=4, vocab=64)
    assert config.model_copy(update=own).has_global_heads == bool(own)
