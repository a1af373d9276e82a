"""A `model = dict(...)` of InternEvo is the model that InternEvo builds: logits and gradients,
names and shapes."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.comm.layout import layout_of
from megaprec.dialects.internevo import resolve
from megaprec.dialects.reading import UNKNOWN
from megaprec.errors import UserError
from megaprec.precision.gemm import slow_bf16
from megaprec.precision.plan import plan
from models.attention.attention import Attention
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Cut, Stage
from models.logical_shapes import logical_shapes
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.families import BATCH, LENGTH, Job, step_all
from tests.internevo_model import InternEvo
from tests.refusals import raises, sentence
from tools.commands.precision import read_precision
from tools.config.run_file import RunConfig, load_run
from tools.console.toml import toml
from tools.verify.parity.runs import epsilon, in_float64

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_layers": 2,
    "vocab_size": 97,
}
LATER = {**SIZES, "num_kv_attention_heads": 2}
DICTS: dict[str, dict[str, Any]] = {
    "the fifteen keys of the documentation": {
        **SIZES,
        "checkpoint": 0.5,
        "embed_split_hidden": True,
        "embed_grad_scale": 1,
        "parallel_output": True,
        "mlp_ratio": 8 / 3,
        "apply_post_layer_norm": False,
        "dtype": "torch.float32",
        "norm_type": "rmsnorm",
        "layer_norm_epsilon": 1e-5,
        "use_flash_attn": True,
        "num_chunks": 1,
    },
    "sizes alone": SIZES,
    "layer norms, small gradients": {
        **SIZES,
        "norm_type": "layernorm",
        "layer_norm_epsilon": 1e-3,
        "embed_grad_scale": 0.1,
        "rope_base": 500,
    },
    "no flash attention": {**SIZES, "use_flash_attn": False, "mlp_ratio": 2.6},
    "two products": {**SIZES, "use_swiglu": False, "mlp_ratio": 2.6, "checkpoint": True},
    "two products asked for without flash attention": {
        **SIZES,
        "use_swiglu": False,
        "use_flash_attn": False,
    },
    "FP32 residual and norms": {
        **SIZES,
        "residual_in_fp32": True,
        "use_fp32_norm": True,
        "embed_grad_scale": 0.5,
    },
    "stretched": {**SIZES, "use_dynamic_ntk_rope": True, "max_position_embeddings": 8},
    "LLAMA2": {**LATER, "model_type": "LLAMA2"},
    "LLAMA2 without biases, halves": {
        **LATER,
        "model_type": "LLAMA2",
        "no_bias": True,
        "adapt_hf": True,
    },
    "INTERNLM2": {
        **LATER,
        "model_type": "INTERNLM2_PUBLIC",
        "num_kv_attention_heads": 1,
        "rope_base": 1e6,
    },
    "INTERNLM2, neighbours": {
        **LATER,
        "model_type": "INTERNLM2_PUBLIC",
        "adapt_hf": False,
        "embed_grad_scale": 0.2,
    },
}
LAYOUTS = [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)]


def run_of(given: Mapping[str, Any], *overrides: str) -> RunConfig:
    """The run that begins with this dict."""
    train = ["train.steps=1", "train.global_batch=2", "train.micro_batch=1", "data.vocab_size=90"]
    train.append(f"train.seq_length={LENGTH}")
    return load_run(None, [*train, f"precision.internevo={toml(given)}", *overrides])


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights of a size that matters, norms and biases included."""
    generator = torch.Generator().manual_seed(5)
    noise = {
        name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()
    }
    return {
        name: 0.3 * tensor + float("norm" in name and "weight" in name)
        for name, tensor in noise.items()
    }


@cache
def theirs(name: str) -> tuple[Job, float, dict[str, Tensor]]:
    """What ours is to do, and the loss and gradients that InternEvo's model has, with the logits
    among them."""
    model = InternEvo(DICTS[name])
    run = run_of(DICTS[name])
    ids = torch.randint(0, 97, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(6))
    tokens = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous()
    weights = random(model.shapes())
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in weights.items()}
    logits = model.logits(leaves, tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {key: tensor.grad for key, tensor in leaves.items() if tensor.grad is not None}
    found = {**model.as_ours(grads), "logits": logits.detach().flatten(0, 1).t()}
    return (
        Job(run.model, model.as_ours(weights), tokens, targets, run.recompute),
        loss.item(),
        found,
    )


@cache
def ours(
    names: tuple[str, ...], tp: int, pp: int, sequence: bool
) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """These dicts in one start of the ranks."""
    return dict(
        zip(names, step_all([theirs(name)[0] for name in names], tp, pp, sequence), strict=True)
    )


@pytest.mark.cases(1, sample=2)
@pytest.mark.parametrize("name", DICTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dict_is_the_model_that_internevo_builds(
    name: str, layout: tuple[int, int, bool], alike: list[dict[str, Any]]
) -> None:
    """Every logit and every gradient, those of biases and the scaled ones included, in float64."""
    _, their_loss, expected = theirs(name)
    loss, found = ours(tuple(case["name"] for case in alike if case["layout"] == layout), *layout)[
        name
    ]
    assert loss == pytest.approx(their_loss, rel=1e-12)
    assert found.keys() == expected.keys()
    # a bias of keys has no gradient but rounding
    largest = max(tensor.abs().max() for tensor in expected.values())
    for key, tensor in expected.items():
        scale = largest if key.endswith("key.bias") else tensor.abs().max()
        assert (found[key] - tensor).abs().max() <= 1e-12 * scale, key
        assert tensor.any(), f"{key}: a gradient of zero proves nothing"


@pytest.mark.parametrize("name", DICTS)
def test_names_and_shapes_of_internevo_are_ours_one_to_one(name: str) -> None:
    """Each of their elements is one of ours, and each of ours one of theirs."""
    model = InternEvo(DICTS[name])
    shapes = InternEvo(DICTS[name]).shapes()
    first = 0
    numbered: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        count = torch.Size(shape).numel()
        numbered[key] = torch.arange(first, first + count).view(shape)
        first += count
    mapped = model.as_ours(numbered)
    assert {key: tuple(tensor.shape) for key, tensor in mapped.items()} == logical_shapes(
        run_of(DICTS[name]).model
    )
    assert torch.equal(
        torch.cat([tensor.flatten() for tensor in mapped.values()]).sort().values,
        torch.arange(first),
    )


def test_the_names_are_those_of_internevos_modules() -> None:
    """`modeling_internlm.py`; of `flash_attn.modules.embedding.ParallelGPT2Embeddings` the table is
    word_embeddings."""
    shapes = InternEvo({**SIZES, "num_layers": 1}).shapes()
    assert shapes == {
        "embedding.word_embeddings.weight": (97, 24),
        "blocks.0.mixer.Wqkv.weight": (72, 24),
        "blocks.0.mixer.Wqkv.bias": (72,),
        "blocks.0.mixer.out_proj.weight": (24, 24),
        "blocks.0.mixer.out_proj.bias": (24,),
        "blocks.0.norm1.weight": (24,),
        "blocks.0.norm2.weight": (24,),
        "blocks.0.mlp.w1.weight": (256, 24),
        "blocks.0.mlp.w2.weight": (24, 256),
        "blocks.0.mlp.w3.weight": (256, 24),
        "norm.weight": (24,),
        "head.weight": (97, 24),
    }


def test_a_dict_without_sizes_leaves_the_model_to_the_run_file() -> None:
    native = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.family=gpt2"]
    run = run_of(
        {"dtype": "torch.bfloat16", "embed_grad_scale": 0.1, "use_flash_attn": False}, *native
    )
    m = run.model
    assert (m.norm, m.positions, m.mlp, m.ffn, m.tied, m.mlp_bias) == (
        "layer",
        "learned",
        "gelu",
        256,
        True,
        True,
    )
    assert (m.embedding_grad_scale, m.head_grad_scale, m.dropout_at, m.init_std) == (
        0.1,
        0.1,
        "branches",
        0.02,
    )


@pytest.mark.parametrize("size", ["num_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_one_size_makes_a_whole_model_of_internevos_defaults(size: str) -> None:
    """`build_model_with_cfg`: 48 layers, 2048 features, 32 heads, 50304 tokens, mlp_ratio 4, RMS
    norms, 1e-5, 10000."""
    default = {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "vocab_size": 50304,
    }
    run = run_of({size: default[size]})
    m = run.model
    assert (m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.vocab, m.ffn) == (
        48,
        2048,
        32,
        32,
        64,
        50304,
        8192,
    )
    assert (m.norm, m.norm_eps, m.rope_base, m.mlp, m.tied) == (
        "rms",
        1e-5,
        10000.0,
        "swiglu",
        False,
    )
    assert (m.qkv_bias, m.output_bias, m.mlp_bias) == (True, True, False)
    assert "mlp_ratio (InternEvo's default)" in run.origin("model.ffn")


@pytest.mark.parametrize(
    ("given", "overrides", "line"),
    [
        (
            SIZES,
            ["model.ffn=128"],
            sentence(
                "config.dialect_contradicted",
                key="model.ffn",
                value=128,
                decider=re.compile("mlp_ratio"),
                decided=256,
            ),
        ),
        (
            SIZES,
            ["model.qkv_bias=false"],
            sentence(
                "config.dialect_contradicted",
                key="model.qkv_bias",
                value="false",
                decided="true",
            ),
        ),
        (
            SIZES,
            ["model.norm_eps=1e-6"],
            sentence(
                "config.dialect_contradicted",
                key="model.norm_eps",
                value="1e-06",
                decider=re.compile(r"\(InternEvo's default\)"),
            ),
        ),
        (
            SIZES,
            ["model.window=4"],
            sentence(
                "config.dialect_contradicted",
                key="model.window",
                value=4,
                decider="InternEvo, always",
            ),
        ),
        (
            SIZES,
            ["model.init_std=0.01"],
            sentence(
                "config.dialect_contradicted",
                key="model.init_std",
                value="0.01",
                decider="InternEvo, always",
            ),
        ),
        (
            SIZES,
            ["model.preset=llama-demo"],
            sentence("config.preset_beside_dialect", table="[precision.internevo]"),
        ),
        (
            {"norm_type": "layernorm"},
            [],
            "norm_type = .*describes a model, but none of num_layers, hidden_size, .*",
        ),
        ({"mlp_ratio": 2.0}, [], "mlp_ratio = 2.0.*describes a model"),
        (
            {**SIZES, "no_bias": True},
            [],
            "no_bias = true.*INTERNLM has no such key.*only INTERNLM2_PUBLIC, LLAMA2",
        ),
        (LATER, [], "num_kv_attention_heads = 2.*INTERNLM has no such key"),
        (
            {**LATER, "model_type": "LLAMA2", "use_dynamic_ntk_rope": True},
            [],
            "LLAMA2 has no such key.* INTERNLM, INTER",
        ),
        (
            {**SIZES, "model_type": "INTERNLM_MoE"},
            [],
            "model_type = .*not supported: .*INTERNLM, INTERNLM2_PUBLIC, LLAMA2",
        ),
        ({**SIZES, "num_experts": 4}, [], "num_experts = 4.*mixtures of experts"),
        ({**SIZES, "is_reward": True}, [], "is_reward = true.*reward"),
        ({**SIZES, "output_tf32": True}, [], "output_tf32 = true.*not supported"),
        (
            {**LATER, "model_type": "INTERNLM2_PUBLIC", "norm_head": True},
            [],
            "norm_head = true.*not supported",
        ),
        ({**LATER, "model_type": "LLAMA2", "deepnorm": True}, [], "deepnorm = true"),
        (
            {**LATER, "model_type": "LLAMA2", "apply_post_layer_norm": True},
            [],
            "apply_post_layer_norm = true",
        ),
        (
            {**LATER, "model_type": "LLAMA2", "init_type": "uniform"},
            [],
            'init_type = "uniform".*normal here',
        ),
        (
            {**SIZES, "num_attention_heads": 5},
            [],
            "num_attention_heads = 5.*must divide hidden_size 24",
        ),
        (
            {**LATER, "model_type": "LLAMA2", "num_kv_attention_heads": 3},
            [],
            "num_kv_attention_heads = 3.*must divide",
        ),
        ({**SIZES, "qk_interleaved": True}, [], "qk_interleaved = true.*no such key"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_what_internevo_would_not_build_or_says_otherwise_is_refused(
    given: dict[str, Any], overrides: list[str], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        run_of(given, *overrides)


@pytest.mark.parametrize("name", ["sizes alone", "stretched", "LLAMA2 without biases, halves"])
def test_a_saved_run_of_a_dict_is_the_same_run(name: str, tmp_path: Path) -> None:
    run = run_of({**DICTS[name], "dtype": "torch.tf32"})
    again = load_run(run.save_resolved(tmp_path))
    assert dict(again) == dict(run) and again.plan == run.plan


def test_a_key_whose_value_is_not_known_is_not_at_its_default() -> None:
    resolved = resolve(
        {**SIZES, "num_attention_heads": UNKNOWN, "mlp_ratio": UNKNOWN, "drop_rate": UNKNOWN}
    )
    open_ = {"model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "model.dropout"}
    assert not open_ & set(resolved.settings)
    assert resolved.settings["model.layers"].value == 2
    assert any(
        "drop_rate, mlp_ratio, num_attention_heads: the value is not known" in note
        for note in resolved.notes
    )
    assert not any("mlp_ratio 4" in note for note in resolved.notes)
    for numeric in (
        {"dtype": UNKNOWN},
        {"grad_scaler": UNKNOWN},
        {"grad_scaler": {"fp16": {"min_scale": UNKNOWN}}},
    ):
        with raises(
            "dialect.wrong_value",
            value="(not known)",
            why=re.compile("^numbers depend on it: set precision.internevo."),
        ):
            resolve(numeric)
    sizes = {"tensor": {"size": UNKNOWN, "mode": UNKNOWN}, "zero1": UNKNOWN, "pipeline": 2}
    spread = resolve({"hybrid_zero_optimizer": {"clip_grad_norm": UNKNOWN}, "parallel": sizes})
    assert set(spread.settings) == {"parallel.pipeline"}
    assert (
        "clip_grad_norm, parallel.tensor.mode, parallel.tensor.size, parallel.zero1: the "
        "value is not known"
    ) in spread.notes[1]


def test_what_internevos_file_says_beside_the_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        'model_type = "LLAMA2"\nuse_fp32_norm = True\nHEADS = 4\n'
        "model = dict(num_attention_heads=HEADS, num_kv_attention_heads=UNSAID, "
        "hidden_size=64, no_bias=True)\n"
    )
    found = read_precision(file)
    assert found.settings["model.qkv_bias"].value is False
    assert found.plan.keep_fp32
    assert "model.kv_heads" not in found.settings
    assert any("num_kv_attention_heads: the value is not known" in note for note in found.notes)


@pytest.mark.parametrize(
    ("dtype", "flash", "attention", "scores"),
    [
        ("torch.float32", True, torch.bfloat16, torch.float32),
        ("torch.tf32", True, torch.bfloat16, torch.float32),
        ("torch.tf32", False, torch.float32, torch.float32),
        ("torch.bfloat16", True, torch.bfloat16, torch.float32),
        ("torch.bfloat16", False, torch.bfloat16, torch.bfloat16),
        ("torch.float16", False, torch.float16, torch.float16),
    ],
)
def test_attention_has_the_dtype_that_flash_attention_leaves_it(
    dtype: str, flash: bool, attention: torch.dtype, scores: torch.dtype
) -> None:
    """`modules/multi_head_attention.py`: bf16 under flash attention, softmax in the value's dtype
    without."""
    made = resolve({"dtype": dtype, "use_flash_attn": flash}).plan
    assert (made.attention, made.scores) == (attention, scores)
    assert "precision.internevo.use_flash_attn" in made.origin["attention"]
    assert "precision.internevo.dtype" in resolve({"dtype": dtype}).plan.origin["attention"]


def test_layouts_are_compared_as_exactly_as_attention_is_computed() -> None:
    """`megaprec parity`: an FP32 run whose attention is in BF16 is as exact as BF16; its twin is
    all float64."""
    flash, plain = (
        run_of({**SIZES, "dtype": "torch.float32", "use_flash_attn": on}) for on in (True, False)
    )
    assert (epsilon(flash), epsilon(plain)) == (2.0**-7, 2.0**-23)
    exact = in_float64(run_of({**SIZES, "dtype": "torch.bfloat16", "use_flash_attn": False})).plan
    assert {exact.attention, exact.scores, exact.buffers} == {torch.float64}


def attended(x: Tensor, **changes: Any) -> tuple[Tensor, Tensor, Attention]:
    """What a layer's attention makes of x before its output's product, and x's gradient."""
    config = ModelConfig(layers=1, hidden=32, heads=4, init_std=0.4)
    compute = changes.pop("compute", "fp32")
    layer = Attention(config, Context(plan(compute, **changes)), "attention").to(x.dtype)
    x = x.detach().requires_grad_()
    made = layer._attend(layer.qkv(x), None, MicrobatchInfo(0, torch.arange(x.shape[1])), None)
    made.float().square().sum().backward()
    assert x.grad is not None
    return made.detach(), x.grad, layer


def test_query_key_and_value_are_in_bf16_for_attention_alone() -> None:
    x = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(1))
    made, grad, layer = attended(x, attention=torch.bfloat16)
    assert made.dtype == grad.dtype == torch.float32
    narrow = [
        y.unflatten(-1, (4, 8)).permute(1, 2, 0, 3).bfloat16()
        for y in F.linear(x, layer.qkv.weight).chunk(3, -1)
    ]
    q, k, v = (y.float() if slow_bf16(y) else y for y in narrow)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16()
    assert torch.equal(made, mixed.float().permute(2, 0, 1, 3).flatten(2))
    assert not torch.equal(made, attended(x)[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scores_and_weights_are_rounded_if_the_plan_says_so(dtype: str) -> None:
    held = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    x = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(1)).to(held)
    rounded, _, layer = attended(x, compute=dtype, scores=held)
    q, k, v = (
        y.unflatten(-1, (4, 8)).permute(1, 2, 0, 3).double()
        for y in layer.qkv(x).detach().chunk(3, -1)
    )
    exact = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(
        torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf
    )
    weights = exact.to(held).double().softmax(-1).to(held).double()
    expected = (weights @ v).permute(2, 0, 1, 3).flatten(2)
    unit = torch.finfo(held).eps

    def distance(made: Tensor) -> float:
        return ((made.double() - expected).abs().max() / expected.abs().max()).item()

    assert rounded.dtype == held
    assert distance(rounded) < 2 * unit


def test_a_fraction_of_each_chunk_is_made_again_from_its_first_layer_on_rounded_down() -> None:
    """`PackedFlashInternLm1D`: lid < int(num_layers * checkpoint), where num_layers are those of
    the chunk."""
    run = run_of(
        {**SIZES, "num_layers": 5, "checkpoint": 0.5, "num_chunks": 2, "parallel": {"pipeline": 1}}
    )
    for layers, again in ((range(3), {"0"}), (range(3, 5), {"3"}), (range(5), {"0", "1"})):
        cut = Cut(0, layers, first=False, last=False)
        stage = Stage(run.model, Context(plan("fp32"), recompute=run.recompute), cut)
        assert stage.recomputed_layers == again
    assert run_of({**SIZES, "checkpoint": True}).recompute.count_whole_layers(7) == 7
    assert run_of({**SIZES, "checkpoint": False}).recompute.count_whole_layers(7) == 0


def test_dropout_is_where_internevo_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block's input, which is the residual then, and of what attention adds; not of the
    feed-forward's."""
    run = run_of({**SIZES, "drop_rate": 0.25, "attn_drop_rate": 0.5})
    model = InternEvo(SIZES)
    assert (run.model.dropout, run.model.dropout_at, run.model.attention_dropout) == (
        0.25,
        "stream",
        0.5,
    )
    config = run.model.model_copy(update={"attention_dropout": 0.0})
    factors = {"0 input": 1.5, "0 attention": 0.5, "1 input": 0.7, "1 attention": 1.2}

    def stand_in(
        x: Tensor, probability: float, context: Context, name: str, place: MicrobatchInfo | None
    ) -> Tensor:
        assert probability == 0.25
        return x * factors.pop(name.removeprefix("layers.").replace(".", " "))

    weights = random(model.shapes())
    ids = torch.randint(0, 97, (2, LENGTH), generator=torch.Generator().manual_seed(6))
    expected = model.logits(weights, ids, lambda where, x: x * factors[where])
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, LENGTH)[0])
    logical = model.as_ours(weights)
    for parameter in stage.parameters():
        for part, first, last in layout_of(parameter).spans():
            parameter.data.view(-1)[first:last] = part.take(logical[part.name]).reshape(-1)
    monkeypatch.setattr("models.decoder.layer.dropout", stand_in)
    monkeypatch.setattr("models.decoder.stages.dropout", stand_in)
    made = stage(ids.t().contiguous(), MicrobatchInfo(0, torch.arange(2))).transpose(0, 1)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    assert not factors, f"nothing was dropped at {[*factors]}"


@pytest.mark.parametrize(
    ("given", "stds"),
    [
        (
            {},
            {
                "embedding": 0.0052,
                "head": 0.0052,
                "query": 0.006,
                "output": 0.006,
                "up": 0.006,
                "down": 0.006,
            },
        ),
        (
            {"use_scaled_init": False},
            {
                "embedding": 0.0052,
                "head": 0.0052,
                "query": 0.006,
                "output": 0.0015,
                "up": 0.006,
                "down": 0.0015,
            },
        ),
        (
            {
                "model_type": "LLAMA2",
                "attn_wqkv_init_std": 0.01,
                "out_head_init_std": 0.03,
                "ffn_other_init_std": 0.04,
            },
            {
                "embedding": 0.02,
                "head": 0.03,
                "query": 0.01,
                "output": 0.02,
                "up": 0.02,
                "down": 0.04,
            },
        ),
    ],
)
def test_initial_weights_have_internevos_standard_deviations(
    given: dict[str, Any], stds: dict[str, float]
) -> None:
    """`reset_parameters`: with use_scaled_init what closes a branch of layer n, from 1, is divided
    by sqrt(2 n)."""
    run = run_of({**SIZES, **given, "hidden_size": 64, "vocab_size": 1000, "num_layers": 3})
    stage = Stage(run.model, Context(plan("fp32")), cuts(run.model, 1, LENGTH)[0])
    seen = 0
    for parameter in stage.parameters():
        for part, first, last in layout_of(parameter).spans():
            names = part.name.split(".")
            which = next((name for name in names if name in stds), None)
            if which is None or names[-1] == "bias":
                continue
            layer = int(names[1]) if names[0] == "layers" else 0
            closing = which in ("output", "down") and given.get("use_scaled_init", True)
            expected = stds[which] / ((2 * (layer + 1)) ** 0.5 if closing else 1)
            assert parameter.data.view(-1)[first:last].std().item() == pytest.approx(
                expected, rel=0.05
            ), part.name
            seen += 1
    assert seen == 2 + 3 * 4
