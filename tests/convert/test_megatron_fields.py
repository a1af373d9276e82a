"""Every field of megatron-core and every argument of its GPTModel: the same logits, or refused by
that name.

The oracle is megatron-core's own model on one CPU rank, in FP32. Fields that it takes on GPUs alone
are refused or have a reason in `tools.convert.megatron.keys`, as every other one has.
"""

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from tests.other_systems import MEGATRON, NEEDS_MEGATRON
from tests.ranks import run_ranks
from tools.convert.core.names import megatron
from tools.convert.core.rules import head_sizes, matches
from tools.convert.megatron.args import model_of_args
from tools.convert.megatron.keys import ALIASES, ALLOWED_VALUES, FREE, FREE_PREFIXES, READ_ARGUMENTS

pytestmark = [pytest.mark.filterwarnings("ignore"), NEEDS_MEGATRON]  # warnings of megatron-core
PRELOADED = MEGATRON
VOCAB = 64
LENGTH = 24
BOUND = 1e-5
SHARED: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
}
MODEL = {"vocab_size": VOCAB, "max_sequence_length": LENGTH, "parallel_output": False}
ROTARY = {"position_embedding_type": "rope", "rotary_base": 100}
LLAMA = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"}
LATENT = {
    "multi_latent_attention": True,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,  # kv_channels: attention without Transformer Engine takes values to be as wide
    "rotary_base": 100,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
DEEPSEEK = {
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
}
GPT_OSS = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 0.75,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "perform_initialization": False,  # theirs forgets what it draws for the offset
}
# YaRN in ordinary attention: Megatron-LM's argument -> what GPTModel looks for in its
# configuration.
YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    **{
        name: name
        for name in (
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_correction_range_round_to_int",
        )
    },
}
STRETCHED = dict(zip(YARN, (4.0, 1.0, 0.0, 16, 8.0, 0.5, False), strict=True))
# Fields of TransformerConfig and arguments of GPTModel, of models that differ where fields ask for
# it.
BASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (SHARED | LLAMA, MODEL | ROTARY),
    "gpt2": (SHARED, MODEL | {"share_embeddings_and_output_weights": True}),
    "mixtral": (SHARED | LLAMA | EXPERTS, MODEL | ROTARY),
    "deepseek": (
        SHARED | LLAMA | EXPERTS | LATENT | DEEPSEEK | {"num_query_groups": None},
        MODEL | {"position_embedding_type": "rope"},
    ),
    "gpt_oss": (SHARED | EXPERTS | GPT_OSS, MODEL | ROTARY | {"position_embedding_type": "yarn"}),
}
# Values that are no default, where one cannot be made of the default itself.
OTHERS: dict[str, list[Any]] = {
    "num_layers": [2],
    "hidden_size": [48],
    "num_attention_heads": [2],
    "num_query_groups": [1, 4],
    "kv_channels": [6],
    "ffn_hidden_size": [24],
    "softmax_scale": [0.2, 8**-0.5],
    "softmax_type": ["off-by-one", "learnable"],
    "layernorm_epsilon": [1e-2],
    "activation_func": ["gelu", "silu", "relu", "squared_relu"],
    "window_size": [(4, 0), (4, 1), (-1, 0)],
    "window_attn_skip_freq": [2, [1, 0, 1, 0]],
    "normalization": ["LayerNorm", "RMSNorm"],
    "no_rope_freq": [2, [0, 0, 0, 0]],
    "moe_layer_freq": [2, [1, 1, 1, 1], [0, 1, 1, 1]],
    "moe_router_load_balancing_type": ["none", "sinkhorn", "seq_aux_loss"],
    "moe_router_topk": [1, 3],
    "moe_router_score_function": ["sigmoid"],
    "moe_router_topk_scaling_factor": [2.5],
    "moe_router_num_groups": [2],
    "moe_router_group_topk": [1],
    "moe_ffn_hidden_size": [24],
    "moe_z_loss_coeff": [0.01],
    "moe_input_jitter_eps": [0.1],
    "moe_expert_capacity_factor": [0.5],
    "moe_shared_expert_intermediate_size": [16],
    "activation_func_clamp_value": [0.1],
    "glu_linear_offset": [1.0],
    "mtp_num_layers": [1],
    "experimental_attention_variant": ["dsa"],
    "position_embedding_type": ["rope", "learned_absolute", "mrope", "yarn", "none"],
    "rotary_percent": [0.5],
    "rotary_base": [50],
    "rope_scaling_factor": [4.0],
    "rope_scaling": [True],
    "seq_len_interpolation_factor": [2.0],
    "max_sequence_length": [32],
    "num_moe_experts": [4, 2],
    "moe_latent_size": [16],
    "moe_router_dtype": ["fp64"],
    "q_lora_rank": [None, 6],
    "kv_lora_rank": [6],
    "qk_head_dim": [10],
    "qk_pos_emb_head_dim": [8],
    "v_head_dim": [],
    "rope_type": ["rope"],
    "rotary_scaling_factor": [1.0, 40.0],
    "original_max_position_embeddings": [32],
    "beta_fast": [4.0],
    "beta_slow": [0.25],
    "mscale": [1.0, 0.0],
    "mscale_all_dim": [0.0, 0.7],
    "yarn_original_max_position_embeddings": [32],
    "yarn_beta_fast": [4.0],
    "yarn_beta_slow": [0.25],
    "yarn_correction_range_round_to_int": [True],
}
PAIRS: list[dict[str, Any]] = [
    {"window_size": (4, 0), "window_attn_skip_freq": 2},
    {"window_size": (4, 0), "window_attn_skip_freq": [0, 1, 1, 0]},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_topk": 3, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
    {"rope_scaling": True, "seq_len_interpolation_factor": 2.0},
    {"rope_scaling": True, "rope_scaling_factor": 4.0},
    {"add_bias_linear": True, "add_qkv_bias": True},
    {"qk_layernorm": True, "normalization": "RMSNorm"},
    {"bias_activation_fusion": True, "add_bias_linear": True},
    {"mscale": 1.0, "mscale_all_dim": 0.0},
    {"rope_type": "rope", "mscale_all_dim": 0.0},
    {"moe_router_topk": 3, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
    {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    {
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_num_groups": 2, "moe_router_group_topk": 2},
    {"moe_layer_freq": 3, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16},
    {"moe_layer_freq": [0, 0, 0, 0]},
    {"activation_func": "quick_gelu", "gated_linear_unit": True},
    {"activation_func_clamp_value": 0.5, "glu_linear_offset": 0.0},
    {"glu_linear_offset": 0.5},
    {"activation_func": "squared_relu", "gated_linear_unit": False},
]


STAGES = {"pre_process", "post_process"}  # a stage of a model is none


def core(module: str) -> Any:
    return importlib.import_module(f"megatron.core.{module}")


def config_fields() -> dict[str, Any]:
    """Fields with their defaults, those of multi-latent attention too."""
    found = fields(core("transformer.transformer_config").MLATransformerConfig)
    plain = {
        f.name: f.default for f in fields(core("transformer.transformer_config").TransformerConfig)
    }
    return {f.name: None if f.default is MISSING else f.default for f in found} | plain


def latent() -> set[str]:
    """Fields that multi-latent attention has besides."""
    plain = {f.name for f in fields(core("transformer.transformer_config").TransformerConfig)}
    return {
        f.name for f in fields(core("transformer.transformer_config").MLATransformerConfig)
    } - plain


def arguments() -> dict[str, Any]:
    """Arguments of GPTModel with their defaults."""
    given = list(inspect.signature(core("models.gpt").GPTModel.__init__).parameters.values())[2:]
    return {p.name: None if p.default is inspect.Parameter.empty else p.default for p in given}


@pytest.mark.slow
def test_every_field_and_argument_is_accounted_for() -> None:
    known = {*ALLOWED_VALUES, *READ_ARGUMENTS, *ALIASES, *FREE}
    names = [*config_fields(), *arguments()]
    assert len(names) > 250
    assert not [name for name in names if name not in known and not name.startswith(FREE_PREFIXES)]


def changes() -> Iterator[dict[str, Any]]:
    for name, default in {**config_fields(), **arguments(), **dict.fromkeys(YARN)}.items():
        if name in STAGES:
            continue
        if name in OTHERS:
            yield from ({name: value} for value in OTHERS[name])
        elif isinstance(default, bool):
            yield {name: not default}
        elif isinstance(default, int):
            yield {name: default + 1}
        elif isinstance(default, float):
            yield {name: default + 0.125}
    yield from PAIRS


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", BASES)
def test_every_field_gives_the_same_logits_or_is_refused_by_name(kind: str) -> None:
    (verdicts,) = run_ranks(walk, {"dp": 1}, kind=kind)
    wrong = [
        f"{change}: {verdict}"
        for change, verdict in verdicts
        if verdict.startswith(("taken", "refused without"))
    ]
    same = [change for change, verdict in verdicts if verdict == "same"]
    assert not wrong, "\n".join(wrong)
    assert len(same) > 60 and sum(verdict == "refused" for _, verdict in verdicts) > 30


def walk(mesh: DeviceMesh, kind: str) -> list[tuple[dict[str, Any], str]]:
    torch._dynamo.config.disable = (
        True  # theirs as it is written: compiling its small functions takes longer
    )
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]  # it asks without looking
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    core("tensor_parallel.random").CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    core("transformer.utils").get_sliding_window_causal_mask = windowed
    core("fusions.fused_softmax").get_sliding_window_causal_mask = windowed
    core(
        "transformer.moe.moe_utils"
    ).te_general_gemm = None  # it asks for Transformer Engine's without looking
    without_transformer_engine()
    core("parallel_state").initialize_model_parallel(1, 1)
    plain = judge(kind, {})
    assert plain == "same", plain
    return [(change, judge(kind, change)) for change in changes()]


def without_transformer_engine() -> None:
    """Multi-latent attention tells its core the widths of keys and values, which only Transformer
    Engine's takes."""
    attention = core("transformer.dot_product_attention").DotProductAttention
    made = attention.__init__
    attention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **options: made(
        self, *a, **options
    )
    core("transformer.multi_latent_attention").HAVE_TE = False


def windowed(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Theirs makes it on a GPU: True where nothing is seen."""
    ones = torch.ones(queries, keys, dtype=torch.bool)
    return ~ones.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def judge(kind: str, change: dict[str, Any]) -> str:
    config, model = (dict(part) for part in BASES[kind])
    is_yarn = {**model, **change}.get("position_embedding_type") == "yarn"
    yarn = dict(STRETCHED) if kind == "gpt_oss" and is_yarn else {}
    unused: dict[str, Any] = {}
    for name, value in change.items():
        if name in yarn:
            yarn[name] = value
        elif name in (*latent(), *YARN) and kind != "deepseek":
            unused[name] = (
                value  # of Megatron-LM's args; its configuration of such models has no such field
            )
        else:
            (model if name in arguments() and name not in config_fields() else config)[name] = value
    for name in (
        "rotary_percent",
        "rotary_base",
    ):  # both have them; who reads them depends on the attention
        if kind != "deepseek" and name in (held := {**config, **unused}):
            model[name] = held[name]
            config.pop(name, None)
    said = {
        **arguments(),
        **({name: config_fields()[name] for name in latent()} if kind == "deepseek" else {}),
    }
    said |= config | model | yarn | unused
    try:
        ours = model_of_args(said, None)
    except UserError as error:
        names = {*change, *(ALIASES.get(name, name) for name in change)}
        if any(name in str(error) for name in names):
            return "refused"
        return f"refused without its name: {error}"
    try:
        made = theirs(config, model, {YARN[name]: value for name, value in yarn.items()})
        logits = run(made)
    except Exception as error:
        return f"not made: {type(error).__name__} {error}"[:200]
    try:
        expected = made_once(ours, made.state_dict(), made.config.rotary_interleaved)
        apart = (logits - expected).abs().max() / logits.abs().max()
    except KeyError as error:
        return f"taken, but its tensors are others: {error}"
    if apart <= BOUND:
        return "same"
    return f"taken, and another model: logits differ by {apart:.2g}"


def theirs(config: dict[str, Any], model: dict[str, Any], beside: dict[str, Any]) -> Any:
    functions = {name: getattr(torch.nn.functional, name) for name in ("gelu", "silu", "relu")}
    functions["squared_relu"] = core("activations").squared_relu
    functions["quick_gelu"] = core("fusions.fused_bias_geglu").quick_gelu
    kwargs = {**config, "activation_func": functions[config.get("activation_func", "gelu")]}
    kind = "MLATransformerConfig" if config.get("multi_latent_attention") else "TransformerConfig"
    made = getattr(core("transformer.transformer_config"), kind)(**kwargs)
    for name, value in beside.items():
        setattr(made, name, value)
    layers = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        made,
        use_transformer_engine=False,
        normalization=made.normalization,
        qk_l2_norm=made.qk_l2_norm,
    )
    torch.manual_seed(0)
    built = core("models.gpt").GPTModel(made, layers, **model).eval()
    corrections = ((n, b) for n, b in built.named_buffers() if n.endswith("expert_bias"))
    with torch.no_grad():
        for name, values in (*built.named_parameters(), *corrections):
            values.copy_(
                0.25 * torch.randn(values.shape) + float("norm" in name and name.endswith("weight"))
            )
    return built


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def run(model: Any) -> Tensor:
    positions = torch.arange(LENGTH)[None].expand(2, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens(), positions, future).float()


OURS: dict[tuple[str, bool, str], Tensor] = {}


def made_once(config: ModelConfig, state: dict[str, Tensor], interleaved: bool) -> Tensor:
    """Our logits, computed once for all changes that leave our configuration and their weights as
    they are."""
    read = hashlib.sha256()
    for name, values in state.items():
        if isinstance(values, Tensor):
            read.update(f"{name} {values.dtype} {values.shape}".encode() + values.numpy().tobytes())
    key = config.model_dump_json(), interleaved, read.hexdigest()
    if key not in OURS:
        OURS[key] = of_ours(config, state, interleaved)
    return OURS[key]


@torch.no_grad()
def of_ours(config: ModelConfig, state: dict[str, Tensor], interleaved: bool) -> Tensor:
    """Our logits with their weights."""
    rules = megatron(False, interleaved, config)
    sizes = head_sizes(config)
    found = matches(rules, config)
    state = {
        name: values
        for name, values in state.items()
        if values is not None and "_extra_state" not in name
    }
    weights = {
        name: part
        for match in found
        for name, part in zip(
            match.logical, match.how.split(state.pop(match.foreign), sizes), strict=True
        )
    }
    if others := [name for name in state if not (config.tied and name == "output_layer.weight")]:
        raise KeyError(others[0])
    stage = Stage(config, Context(plan("fp32")), cuts(config, 1, LENGTH)[0])
    for parameter in stage.parameters():
        for part, first, last in layout_of(parameter).spans():
            parameter.view(-1)[first:last] = weights[part.name].reshape(-1)
    return stage(tokens().t()).transpose(0, 1)
