"""Every field of the configuration classes of transformers: the same logits, or refused by that
name; none is left out.

The oracle is transformers' own model of the same config.json, in float64.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from megaprec.errors import UserError
from tests.other_systems import CONFIGS, usually
from tests.refusals import sentence
from tools.convert.hf.config import config_of, from_hugging_face
from tools.convert.hf.families import FAMILIES
from tools.convert.probe import BOUND, check_config, difference, reduced

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
KINDS = tuple(FAMILIES)
# of which a quarter can turn too
NEOX = {
    **CONFIGS["gpt_neox"],
    "hidden_size": 32,
    "rotary_pct": 0.5,
}
SMALL = {kind: CONFIGS[kind] for kind in KINDS}
# with layers of all kinds
SMALL |= {"gpt_neox": NEOX, "nemotron_h": CONFIGS["nemotron_h-experts"]}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
SLIDING = ["full_attention", "sliding_attention"] * 2
ROPES: list[Any] = [
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "default", "rope_theta": 50.0, "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 2.0, "type": "dynamic"},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    YARN,
    {**YARN, "factor": None},
    {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
    {**YARN, "attention_factor": 1.7},
    {**YARN, "attention_factor": 0.0},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN, "mscale": 0.7},
    {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    {**YARN, "truncate": False},
    {**YARN, "truncate": None},
    {**YARN, "partial_rotary_factor": 0.5},
    {**LLAMA3, "original_max_position_embeddings": 16},
    LLAMA3,
    {**LLAMA3, "high_freq_factor": None},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 5, "long_factor": [2.0] * 5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "mrope_section": [1, 2, 2]},
    {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
]
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
# Values that are no default, where one cannot be made of the default itself.
OTHERS: dict[str, list[Any]] = {
    "activation_function": ["gelu", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu"],
    "hidden_act": ["gelu", "gelu_new", "silu", "swish", "relu", "gelu_pytorch_tanh"],
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [50.0, 10000, 10000.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [16],
    "moe_latent_size": [16],
    "n_group": [1, 2, 4],
    "topk_group": [1, 3],
    "max_position_embeddings": [40],  # the probe has half as many tokens more
    "layer_types": [
        SLIDING,
        ["full_attention"] * 4,
        ["sliding_attention"] * 4,
        ["chunked_attention"] * 4,
        SLIDING[:3],
    ],
    "max_window_layers": [0, 2, 4],
    "sliding_window": [5, None, 0],
    "num_attention_heads": [2],
    "n_head": [2],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [6, 8, None],
    "hidden_size": [48],
    "n_embd": [32],
    "n_inner": [20],
    "mlp_only_layers": [[1]],
    "decoder_sparse_step": [2],
    "num_experts_per_tok": [1, 3],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1}],
    "problem_type": ["regression"],
    "dtype": ["bfloat16"],
    "torch_dtype": ["float16"],
    "architectures": [["OtherForCausalLM"]],
    "transformers_version": ["4.1.0"],
    "tie_word_embeddings": [True, False],
    "bos_token_id": [7, None],
    "eos_token_id": [7, [7, 8], None],
    "pad_token_id": [7],
    "per_layer_config": [{"1": {"sliding_window": 5}}],
    "quantization_config": [
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "mxfp4", "new": 1},
    ],
    "is_causal": [False, True, None],
    "attn_logit_softcapping": [5.0, None],
    "final_logit_softcapping": [5.0, None, 0.0],
    "experts_per_token": [2],
    "initial_context_length": [17],
    "swiglu_alpha": [1.1],
    "swiglu_limit": [0.3],
    "logit_scale": [0.5],
    "layer_norm_eps": [1e-3],
    "layer_norm_epsilon": [1e-3],
    "rms_norm_eps": [1e-3],
    "classifier_dropout": [0.3],
    "summary_type": ["last"],
    "summary_activation": ["tanh"],
    "auto_map": [{"AutoModelForCausalLM": "modeling_x.X"}],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "qkv_bias": [True, False],
    "use_qk_norm": [True],
    "tie_encoder_decoder": [True],
    "pruned_heads": [{"1": [0]}],
    "use_mrope": [True],
    "attention_multiplier": [0.3],
    "residual_multiplier": [0.3],
    "embedding_multiplier": [12.0],
    "logits_scaling": [4],
    "temperature": [0.7],
    "no_rope_layers": [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0]],
    "no_rope_layer_interval": [1, 2, 9],
}
# Further names of the kinds of layers: a file that has two of them must say one thing.
KINDS_OF_LAYERS = {"layer_types": ("layers_block_type", "hybrid_override_pattern")}
# Keys that no class has a field for, but that people's files have; all are tried with every family.
FOREIGN = (
    "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "layer_types",
    "is_causal", "head_dim", "quantization_config", "attn_logit_softcapping", "final_logit_softcapping",
    "logit_scale", "per_layer_config", "torch_dtype", "sliding_window", "use_sliding_window", "max_window_layers",
    "attention_bias", "mlp_bias", "rotary_pct", "rotary_emb_base", "auto_map", "qkv_bias", "use_qk_norm",
    "pruned_heads", "use_mrope", "attention_multiplier", "residual_multiplier", "embedding_multiplier",
    "router_jitter_noise", "embd_pdrop", "resid_pdrop", "hidden_dropout", "norm_topk_prob", "temperature",
    "num_experts", "num_local_experts", "rope_interleaved", "tie_encoder_decoder", "num_labels", "hidden_size",
    "num_hidden_layers", "n_ctx",
)  # fmt: skip


def fields_of(kind: str) -> dict[str, Any]:
    """The fields of a family's class and of its bases, with their defaults."""
    found = fields(transformers.AutoConfig.for_model(kind))
    return {f.name: f.default if f.default is not MISSING else None for f in found}


def others(name: str, default: Any) -> list[Any]:
    """Values of a field that are not its default."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1]
    if isinstance(default, float):
        return [default + 0.125]
    return {"rotary_pct": [0.75], "rotary_emb_base": [50.0]}.get(name, [True, 1, 0.125])


def changes(kind: str) -> Iterator[dict[str, Any]]:
    """Changes to a family's small config.json: each field in turn, and some that only together do
    something."""
    known = fields_of(kind)
    for name in dict.fromkeys((*known, *FOREIGN)):
        yield from ({name: value} for value in others(name, known.get(name)))
    for types in OTHERS["layer_types"]:
        yield {**WINDOW, "layer_types": types}
    yield from ({**WINDOW, "max_window_layers": first} for first in (0, 1, 3, 4, 9))
    yield {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default"},
    }
    yield {"rope_parameters": {**YARN, "rope_theta": 10.0}, "rope_theta": 20.0}
    for kind_of_rope in (
        YARN,
        LLAMA3,
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "linear", "factor": 2.0},
    ):
        yield {"rope_scaling": kind_of_rope, "original_max_position_embeddings": 12}
        yield {"rope_scaling": kind_of_rope, "rotary_pct": 0.75}


def judge(config: dict[str, Any], change: dict[str, Any]) -> str:
    """What happens to a change: same, refused, or what is wrong with that."""
    try:
        from_hugging_face(config)
    except UserError as error:
        named = any(
            str(name) in str(error)
            for key, value in change.items()
            for name in names_in(key, value)
        )
        return "refused" if named else f"refused without its name: {error}"
    try:
        apart = difference(json.dumps(config))
    except UserError as error:
        if "convert.probe_no_model" in error.codes:
            return ""
        return f"taken, but its tensors are refused: {error}"
    if apart <= BOUND:
        return "same"
    return f"taken, and another model: logits differ by {apart:.2g}"


def names_in(key: str, value: Any) -> set[str]:
    """A key, and those inside of it; ours for what pydantic finds wrong."""
    inner = set(value) if isinstance(value, dict) else set()
    return {
        key,
        *inner,
        *({"heads"} if "heads" in key else set()),
        *({"layers"} if "layers" in key else set()),
        *({"groups"} if key == "n_groups" else set()),
        *KINDS_OF_LAYERS.get(key, ()),
    }


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", usually(("qwen3",), KINDS))
def test_every_field_gives_the_same_logits_or_is_refused_by_name(kind: str) -> None:
    verdicts = [(change, judge({**SMALL[kind], **change}, change)) for change in changes(kind)]
    wrong = [
        f"{change}: {verdict}"
        for change, verdict in verdicts
        if verdict not in ("same", "refused", "")
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(verdict == "same" for _, verdict in verdicts) > 40
    assert sum(verdict == "refused" for _, verdict in verdicts) > 20


@pytest.mark.cases(None, sample=3)
@pytest.mark.parametrize("kind", usually(("cwm", "gemma2"), KINDS))
def test_what_is_read_of_layers_without_the_window_is_written_as_its_class_takes_it(
    kind: str,
) -> None:
    config = SMALL[kind]
    layers = config.get("num_hidden_layers", 4)
    full = {"layer_types": ["full_attention"] * layers, "sliding_window": 5}
    try:
        model = from_hugging_face({**config, **full})
    except UserError:
        return
    written = config_of(model, "float32")
    assert not from_hugging_face(written).window
    assert difference(json.dumps(written)) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_key_is_what_its_own_class_says(kind: str) -> None:
    theirs = fields_of(kind)
    theirs.pop("time_step_limit", None)  # which no class reads
    wrong = []
    for key, ours in FAMILIES[kind].defaults.items():
        if key in theirs and not (
            theirs[key] == ours and isinstance(theirs[key], bool) == isinstance(ours, bool)
        ):
            wrong.append(f"{key}: {ours!r}, theirs {theirs[key]!r}")
    made = transformers.AutoConfig.for_model(kind)
    # without rotary positions, and one whose class has all rope parameters as one default
    if kind not in ("gpt2", "nemotron_h", "kimi_linear", "ministral3"):
        base = "rotary_emb_base" if kind == "gpt_neox" else "rope_theta"
        assert (
            made.rope_parameters.get("full_attention", made.rope_parameters)["rope_theta"]
            == FAMILIES[kind].defaults[base]
        )
    assert not wrong, wrong


@pytest.mark.cases(None, sample=3)
@pytest.mark.parametrize("kind", usually(("gpt2", "mixtral"), KINDS))
def test_what_a_file_leaves_out_gives_the_same_logits(kind: str) -> None:
    """Keys that are no sizes, one by one and all together."""
    config = SMALL[kind]
    sizes = (
        "size",
        "layer",
        "heads",
        "embd",
        "n_",
        "experts",
        "vocab",
        "positions",
        "group",
        "pattern",
        "model_type",
    )
    rest = [key for key in config if not any(part in key for part in sizes) or key.endswith("eps")]
    for left in (*([key] for key in rest), rest):
        given = {key: value for key, value in config.items() if key not in left}
        given |= {"head_dim": 6} if "head_dim" in left and kind in ("qwen3",) else {}
        assert difference(json.dumps(given)) <= BOUND, left


@pytest.mark.cases(8, sample=1)
@pytest.mark.parametrize("kind", [*KINDS, "llama-yarn", "llama-stretched", "nemotron_h-experts"])
def test_a_small_model_keeps_what_a_large_one_says(kind: str) -> None:
    """Windows, lengths and patterns are shrunk so that all of them matter to the tokens of the
    probe."""
    large = {**CONFIGS[kind], "pad_token_id": 5}
    small = reduced(large)
    assert small.keys() >= {
        key for key in large if key not in FAMILIES[large["model_type"]].aliases
    }
    model = from_hugging_face(small)
    assert not model.window or model.window < model.max_positions
    assert "computes what" in check_config(large, "it")


def test_a_pattern_of_windows_is_shrunk_with_its_window() -> None:
    large = {
        **CONFIGS["qwen3"],
        "num_hidden_layers": 40,
        "max_position_embeddings": 4096,
        **WINDOW,
        "sliding_window": 512,
    }
    for pattern in (
        {"max_window_layers": 39},
        {"layer_types": ["full_attention"] + 39 * ["sliding_attention"]},
    ):
        model = from_hugging_face(reduced({**large, **pattern}))
        assert (model.layers, model.window) == (4, 6) and 0 < len(model.window_layers) < 4
        assert "computes what" in check_config({**large, **pattern}, "it")


def test_a_key_that_is_read_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself, on readings that are wrong by little."""
    wrong = {"norm_eps": 1e-6, "rope_base": 10001.0, "window": 15, "router_aux_loss": 0.5}
    right = from_hugging_face(CONFIGS["mistral"])
    for key, value in wrong.items():
        difference.cache_clear()
        changed = right.model_copy(update={key: value})
        monkeypatch.setattr(
            "tools.convert.hf.folder.from_hugging_face", lambda _, changed=changed: changed
        )
        assert (difference(json.dumps(CONFIGS["mistral"])) > BOUND) == (key != "router_aux_loss"), (
            key
        )
    difference.cache_clear()


def refusal(config: dict[str, Any]) -> str:
    """The line by which a config.json is refused; "" if it is read."""
    try:
        from_hugging_face(config)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_kind_is_refused_by_its_own_key(kind: str) -> None:
    """Also by the other names of a key; null too, where a model cannot be made with it. No other
    error comes out."""
    read = {
        key: value
        for key, value in FAMILIES[kind].defaults.items()
        if value is not None and not key.endswith("token_id")
    }
    names = {
        other: read[key] for other, key in FAMILIES[kind].aliases.items() if key in read
    } | read
    for key, usual in names.items():
        if isinstance(usual, bool):
            wrong = [1, "true"]
        elif isinstance(usual, str):
            wrong = [1]
        else:
            wrong = ["1", True, -1, [1]]
        for value in [*wrong, {"a": 1}, float("inf")]:
            with pytest.raises(UserError, match=sentence("convert.hf_value_kind", key=key)):
                from_hugging_face({**SMALL[kind], key: value})
        said = refusal({**SMALL[kind], key: None})
        assert not said or FAMILIES[kind].aliases.get(key, key) in said


def test_no_rotary_parameters_are_not_those_of_an_older_file() -> None:
    """gpt-oss's class has YaRN where the key is missing, and plain rotary positions where it is
    empty."""
    for change in ({"rope_parameters": {}}, {"rope_parameters": None}):
        assert difference(json.dumps({**SMALL["gpt_oss"], **change})) <= BOUND, change
