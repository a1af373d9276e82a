"""Every family is the model that transformers builds: the same logits and gradients, whatever the
layout.

transformers rounds norms, softmax, routers and angles to FP32 even in a float64 model. While it
works here, what it calls float32 is float64.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.families import BATCH, CASES, LENGTH, MIXTRAL, THEIRS, Case, Job, config_of, step_all
from tools.convert.hf.families import FAMILIES

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs transformers: the extra hf"
)

NARROW = torch.float32
NAMES = {  # of what they call it in a layer, or outside
    "input_layernorm": "attention_norm",
    "ln_1": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "self_attn.q_a_proj": "attention.query_down",
    "self_attn.q_a_layernorm": "attention.query_down_norm",
    "self_attn.kv_a_layernorm": "attention.key_value_down_norm",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "attn.c_proj": "attention.output",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "ln_2": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "mlp.c_fc": "mlp.up",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
    "mlp.act_fn": "mlp.activation",
    "attention_layernorm": "attention_norm",
    "feedforward_layernorm": "mlp_norm",
    "mlp.c_proj": "mlp.down",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.gate": "mlp.router",
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
    "mlp.router": "mlp.router",
    "self_attn.sinks": "attention.sinks",
    "linear_attn.in_proj_z": "delta_net.gate",
    "linear_attn.in_proj_b": "delta_net.strength",
    "linear_attn.in_proj_a": "delta_net.decay",
    "linear_attn.norm": "delta_net.output_norm",
    "linear_attn.out_proj": "delta_net.output",
    "embed_tokens": "embedding",
    "wte": "embedding",
    "embed_in": "embedding",
    "wpe": "positions",
    "norm": "final_norm",
    "ln_f": "final_norm",
    "final_layer_norm": "final_norm",
    "lm_head": "head",
    "embed_out": "head",
}


# Of families whose rotary partners are neighbours, which in ours are halves of a head apart.
WITH_NEIGHBOURS = ("ernie4_5", "cohere2", "cohere", "glm4", "glm")
# Of families that turn the other way.
TURNED_BACK = ("nanochat",)
TURNING = (".self_attn.q_proj.", ".self_attn.k_proj.")
LATENT = ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj")
OF_DELTA_NET = ("conv1d", "dt_bias", "A_log", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv")
WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
IN_PARTS = ("self_attn.q_proj", *(f"linear_attn.{part}" for part in OF_DELTA_NET))
# Of families with norms after the branches.
AFTER = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
AROUND = {"pre_feedforward_layernorm": "mlp_norm", **AFTER}
NORMS = {"olmo2": AFTER, "olmo3": AFTER, "gemma2": AROUND, "gemma3_text": AROUND, "exaone4": AFTER}
NORMS["gemma4_text"] = AROUND
NORMS["vaultgemma"] = {"pre_feedforward_layernorm": "mlp_norm"}
NORMS["glm4"] = {
    "post_self_attn_layernorm": "attention_post_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}
NORMS["hyperclovax"] = {
    "post_norm1": "attention_post_norm",
    "post_norm2": "mlp_post_norm",
}
# What stands in buffers there, by the ends of their names.
BUFFERS = {"e_score_correction_bias": "mlp.router.correction", "layer_scalar": "scalar"}


def logical(config: Any, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by our logical names; theirs by those that the parameters have in memory."""
    if config.model_type in ("phi3", "glm4", "glm"):
        theirs = _apart(config, theirs)
    if config.model_type != "nemotron_h":
        others = {
            path: _in_halves(config, path, x)
            for path, x in theirs.items()
            if not _is_kimi_delta(config, path)
        }
        named = _of_two_branches(config, others)
        for path in theirs.keys() - others.keys():
            named |= _of_kimi_delta(path, theirs[path])
        return named
    ours: dict[str, Tensor] = {}
    for path, tensor in theirs.items():
        ours |= _of_nemotron_h(config, path.removeprefix("model.").split("."), tensor)
    return ours


def _apart(config: Any, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of Phi-3 or GLM by the names of a Llama, whose projections are tensors of their
    own."""
    rows = [n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)]
    apart: dict[str, Tensor] = {}
    for path, tensor in theirs.items():
        if "qkv_proj" in path:
            parts = tensor.split([*rows, rows[1]])
            kinds = ("q_proj", "k_proj", "v_proj")
            apart |= {path.replace("qkv_proj", k): p for k, p in zip(kinds, parts, strict=True)}
        elif "gate_up_proj" in path:
            for kind, part in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                apart[path.replace("gate_up_proj", kind)] = part
        else:
            apart[path] = tensor
    return apart


def _in_halves(config: Any, path: str, tensor: Tensor) -> Tensor:
    """A tensor of theirs with rotary partners half of a head apart."""
    turns = any(name in path for name in TURNING)
    if config.model_type not in (*WITH_NEIGHBOURS, *TURNED_BACK) or not turns:
        return tensor
    width = len(tensor) // _heads_in(config, path)
    heads = tensor.unflatten(0, (-1, width))
    if config.model_type in TURNED_BACK:
        return heads.roll(width // 2, 1).flatten(0, 1)
    turned = int(width * getattr(config, "rope_parameters", {}).get("partial_rotary_factor", 1))
    parts = (heads[:, 0:turned:2], heads[:, 1:turned:2], heads[:, turned:])
    return torch.cat(parts, 1).flatten(0, 1)


def _heads_in(config: Any, path: str) -> int:
    """The number of heads of queries or keys."""
    return config.num_key_value_heads if ".k_proj." in path else config.num_attention_heads


def _of_path(path: str) -> tuple[str, str, str]:
    """The layer of a tensor of theirs with a dot, its name in it or outside, and its kind."""
    parts = [p for p in path.split(".") if p not in ("model", "transformer", "gpt_neox")]
    layer = f"layers.{parts[1]}." if parts[0] in ("layers", "h") else ""
    name = ".".join(parts[2 if layer else 0 :])
    for ending in (".weight", ".bias", ".alpha_p", ".alpha_n"):
        name = name.removesuffix(ending)
    return layer, name.replace("block_sparse_moe.", "mlp."), parts[-1]


def _of_two_branches(config: Any, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for path, tensor in theirs.items():
        layer, name, kind = _of_path(path)
        if config.model_type == "gpt2" and kind == "weight" and ".c_" in path:
            tensor = tensor.t()  # theirs are [input, output]
        if (
            hasattr(config, "kv_lora_rank") and name in LATENT
        ) or name == "self_attn.kv_a_proj_with_mqa":
            ours |= _of_latents(
                config, f"{layer}attention", name.removeprefix("self_attn."), kind, tensor
            )
        elif config.model_type in WITH_DELTA_NETS and name in IN_PARTS:
            ours |= _of_delta_net(config, layer, name, kind, tensor)
        elif name == "attn.c_attn":
            ours |= _three(f"{layer}attention", kind, tensor.chunk(3))
        elif name == "attention.query_key_value":
            each = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)
            ours |= _three(f"{layer}attention", kind, [part.flatten(0, 1) for part in each])
        elif config.model_type == "gpt_oss" and ".experts." in path:
            ours |= _stacked(f"{layer}mlp.experts", name, tensor)
        elif name == "mlp.experts.gate_up_proj":
            for n, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                ours |= {
                    f"{layer}mlp.experts.{n}.gate.weight": gate,
                    f"{layer}mlp.experts.{n}.up.weight": up,
                }
        elif kind in BUFFERS:
            ours[f"{layer}{BUFFERS[kind]}"] = tensor
        elif name == "mlp.experts.down_proj":
            ours |= {
                f"{layer}mlp.experts.{n}.down.weight": expert for n, expert in enumerate(tensor)
            }
        else:
            kind = "weight" if name == "self_attn.sinks" else kind
            ours[f"{layer}{(NAMES | NORMS.get(config.model_type, {}))[name]}.{kind}"] = tensor
    return ours


def _of_delta_net(
    config: Any, layer: str, name: str, kind: str, tensor: Tensor
) -> dict[str, Tensor]:
    """Tensors of which a head has rows of each kind, and those of all heads in a row, among them
    queries with a gate beside them."""
    if name == "self_attn.q_proj":
        rows = tensor.unflatten(0, (config.num_attention_heads, 2, -1))
        return {
            f"{layer}attention.query.{kind}": rows[:, 0].flatten(0, 1),
            f"{layer}attention.gate.{kind}": rows[:, 1].flatten(0, 1),
        }
    layer = f"{layer}delta_net"
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    if name in ("linear_attn.conv1d", "linear_attn.in_proj_qkv"):
        parts = tensor.reshape(len(tensor), -1).split([keys, keys, values])
        suffix = "_convolution.weight" if "conv1d" in name else ".weight"
        kinds = ("query", "key", "value")
        return {f"{layer}.{which}{suffix}": part for which, part in zip(kinds, parts, strict=True)}
    if name == "linear_attn.dt_bias":
        return {f"{layer}.decay.bias": tensor}
    if name == "linear_attn.A_log":
        return {f"{layer}.decay.log_rate": tensor}
    rows = tensor.unflatten(0, (config.linear_num_key_heads, -1))
    if name == "linear_attn.in_proj_ba":
        kinds = ("strength", "decay")
        parts = rows.chunk(2, 1)
    else:
        assert name == "linear_attn.in_proj_qkvz"
        kinds = ("query", "key", "value", "gate")
        key = config.linear_key_head_dim
        value = values // config.linear_num_key_heads
        parts = rows.split([key, key, value, value], 1)
    return {
        f"{layer}.{which}.weight": part.flatten(0, 1)
        for which, part in zip(kinds, parts, strict=True)
    }


def _is_kimi_delta(config: Any, path: str) -> bool:
    """True for what a layer of Kimi Linear has in place of attention."""
    layer, _, of_layer = path.removeprefix("model.layers.").partition(".")
    if config.model_type != "kimi_linear" or not of_layer.startswith("self_attn."):
        return False
    return config.layer_types[int(layer)] == "linear_attention"


def _of_kimi_delta(path: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of Kimi Delta Attention."""
    layer, _, name = path.removeprefix("model.").partition(".self_attn.")
    layer = f"{layer}.delta_net"
    if name == "conv1d.weight":
        kernels = tensor[:, 0].chunk(3)
        kinds = ("query", "key", "value")
        return {
            f"{layer}.{kind}_convolution.weight": part
            for kind, part in zip(kinds, kernels, strict=True)
        }
    if name == "forget_gate.A_log":
        return {f"{layer}.decay.log_rate": tensor.flatten()}
    ours = {
        "forget_gate.dt_bias": "decay.bias",
        "forget_gate.f_a_proj.weight": "decay_down.weight",
        "forget_gate.f_b_proj.weight": "decay_up.weight",
        "g_a_proj.weight": "gate_down.weight",
        "g_b_proj.weight": "gate_up.weight",
        "b_proj.weight": "strength.weight",
        "o_norm.weight": "output_norm.weight",
        "o_proj.weight": "output.weight",
        "q_proj.weight": "query.weight",
        "k_proj.weight": "key.weight",
        "v_proj.weight": "value.weight",
    }
    return {f"{layer}.{ours[name]}": tensor}


def _of_nemotron_h(config: Any, parts: list[str], tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of layers of one branch. parts: of the name."""
    outside = {"embeddings": "embedding", "norm_f": "final_norm", "lm_head": "head"}
    if parts[0] != "layers":
        return {f"{outside[parts[0]]}.weight": tensor}
    layer = f"layers.{parts[1]}"
    kind = config.layers_block_type[int(parts[1])]
    feeds = kind in ("mlp", "moe")
    if parts[2] == "norm":
        return {f"{layer}.{'mlp' if feeds else 'attention'}_norm.weight": tensor}
    name = ".".join(parts[3:])
    if kind == "moe":
        return _of_ungated_experts(f"{layer}.mlp", name, tensor)
    if kind != "linear_attention":
        branch, _, suffix = name.partition("_proj")
        ours = {"q": "query", "k": "key", "v": "value", "o": "output"}.get(branch, branch)
        return {f"{layer}.{'mlp' if feeds else 'attention'}.{ours}{suffix}": tensor}
    alone = {
        "dt_bias": "step.bias",
        "A_log": "log_rate",
        "D": "skip",
        "norm.weight": "output_norm.weight",
        "out_proj.weight": "output.weight",
    }
    if name in alone:
        return {f"{layer}.mamba.{alone[name]}": tensor}
    values = config.mamba_num_heads * config.mamba_head_dim
    widths = [values, *[config.n_groups * config.ssm_state_size] * 2]
    convolved = ["value", "key", "query"]
    if name == "in_proj.weight":
        kinds = [f"{which}.weight" for which in ("gate", *convolved, "step")]
        rows = tensor.split([values, *widths, config.mamba_num_heads])
    else:
        suffix = name.removeprefix("conv1d.")
        kinds = [f"{which}_convolution.{suffix}" for which in convolved]
        rows = (tensor[:, 0] if suffix == "weight" else tensor).split(widths)
    return {f"{layer}.mamba.{which}": part for which, part in zip(kinds, rows, strict=True)}


def _of_ungated_experts(layer: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of a router, of stacked experts and of shared ones, of Nemotron-H."""
    routers = {"gate.weight": "weight", "gate.e_score_correction_bias": "correction"}
    if name in routers:
        return {f"{layer}.router.{routers[name]}": tensor}
    if name.startswith("shared_experts."):
        part = name.removeprefix("shared_experts.").replace("_proj", "")
        return {f"{layer}.shared.{part}": tensor}
    part = name.removeprefix("experts.").removesuffix("_proj")
    return {f"{layer}.experts.{n}.{part}.weight": expert for n, expert in enumerate(tensor)}


def _of_latents(config: Any, layer: str, name: str, kind: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors whose rows are of several kinds; neighbours turn together in theirs, and halves of a
    head in ours."""
    turning = config.qk_rope_head_dim
    still = config.qk_nope_head_dim
    value = config.v_head_dim
    if name == "kv_b_proj":
        keys, values = tensor.unflatten(0, (-1, still + value)).split([still, value], 1)
        return {
            f"{layer}.key_up.weight": keys.flatten(0, 1),
            f"{layer}.value_up.weight": values.flatten(0, 1),
        }
    if name == "kv_a_proj_with_mqa":
        latent, turned = tensor.split([config.kv_lora_rank, turning])
        # without positions none turns, and the order is theirs
        turns = config.model_type != "kimi_linear"
        halves = torch.cat((turned[0::2], turned[1::2])) if turns else turned
        return {f"{layer}.key_value_down.{kind}": latent, f"{layer}.key_rope.{kind}": halves}
    each = tensor.unflatten(0, (-1, still + turning))
    rows = (each[:, still::2], each[:, still + 1 :: 2], each[:, :still])
    if config.model_type == "kimi_linear":
        rows = (each[:, still:], each[:, :still])
    name = "query_up" if name == "q_b_proj" else "query"
    return {f"{layer}.{name}.weight": torch.cat(rows, 1).flatten(0, 1)}


def _stacked(experts: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Of gpt-oss: features in before features out, columns of gate and up in turn."""
    ours: dict[str, Tensor] = {}
    kind = "bias" if name.endswith("_bias") else "weight"
    for n, expert in enumerate(tensor):
        rows = expert.t() if kind == "weight" else expert
        if "gate_up" in name:
            ours |= {
                f"{experts}.{n}.gate.{kind}": rows[0::2],
                f"{experts}.{n}.up.{kind}": rows[1::2],
            }
        else:
            ours[f"{experts}.{n}.down.{kind}"] = rows
    return ours


def _three(name: str, kind: str, parts: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{which}.{kind}": part
        for which, part in zip(("query", "key", "value"), parts, strict=True)
    }


@contextmanager
def float32_is_float64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(NARROW)


def their_model(case: Case) -> nn.Module:
    """With random weights of a size that matters, norms and biases included."""
    config = transformers.AutoConfig.for_model(case.kind, **{**THEIRS, **case.theirs})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + float("norm" in name or "ln_" in name))
        for _, correction in corrections(model):
            correction.copy_(
                0.1 * torch.randn(correction.shape, generator=generator, dtype=torch.float64)
            )
        for _, scalar in layer_scalars(model):
            scalar.copy_(0.5 + torch.rand(1, generator=generator, dtype=torch.float64))
    return model


def layer_scalars(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers by which layers of Gemma 4 are multiplied, and which are not trained."""
    return [
        (name, values) for name, values in model.named_buffers() if name.endswith(".layer_scalar")
    ]


def corrections(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers by which the choice of experts is corrected."""
    return [
        (name, values)
        for name, values in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    ]


def counting(model: nn.Module) -> dict[str, Tensor]:
    """How many tokens each expert of a router gets from now on, by the name of its correction."""
    counts = {name: torch.zeros_like(values) for name, values in corrections(model)}
    for name, module in model.named_modules():
        if (count := counts.get(f"{name}.e_score_correction_bias")) is not None:

            def count_chosen(_: nn.Module, __: Any, made: Any, count: Tensor = count) -> None:
                count += torch.bincount(made[2].flatten(), minlength=len(count))

            # MiniMax-M2 has it beside its router, others in it
            router = getattr(module, "gate", module)
            router.register_forward_hook(count_chosen)
    return counts


def data(batch: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(
        0, THEIRS["vocab_size"], (batch, LENGTH + 1), generator=torch.Generator().manual_seed(6)
    )
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def by_document(model: nn.Module, tokens: Tensor, documents: Tensor) -> Tensor:
    """Logits [b, s, vocab] of samples of which each document was run by itself."""
    samples = []
    for ids, numbers in zip(tokens, documents, strict=True):
        parts = [model(ids[numbers == n].unsqueeze(0)).logits[0] for n in numbers.unique()]
        samples.append(torch.cat(parts))
    return torch.stack(samples)


def their_step(
    case: Case, batch: int = BATCH, aux: float = 0.0, documents: Tensor | None = None
) -> tuple[Job, float, dict[str, Tensor]]:
    """What our layers are to do, and the loss and the gradients that they are to find, with the
    logits among them."""
    tokens, targets = data(batch)
    with float32_is_float64():
        model = their_model(case)
        counts = counting(model)
        further = 0.0
        if documents is None:
            out = model(tokens, **({"output_router_logits": True} if aux else {}))
            logits = out.logits
            further = aux * out.aux_loss if aux else 0.0
        else:
            logits = by_document(model, tokens, documents)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + further).backward()
    parameters = dict(model.named_parameters())
    loaded = (*parameters.items(), *corrections(model), *layer_scalars(model))
    weights = logical(model.config, {name: tensor.detach() for name, tensor in loaded})
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()
    }
    found = {
        **logical(model.config, grads | counts),
        "logits": logits.detach().flatten(0, 1).t(),
    }
    job = Job(config_of(case), weights, tokens, targets, documents=documents)
    return job, loss.item(), found


@cache
def theirs(name: str) -> tuple[Job, float, dict[str, Tensor]]:
    return their_step(CASES[name])


@cache
def ours(
    names: tuple[str, ...], tp: int, pp: int, sequence: bool
) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """These cases in one start of the ranks."""
    return dict(
        zip(names, step_all([theirs(name)[0] for name in names], tp, pp, sequence), strict=True)
    )


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor], close: float) -> dict[str, float]:
    """Names of tensors that are not close, with how far they are, relative to the largest element.

    Softmax does not see a bias of the keys, nor the scale of what a norm normalises: there all that
    is left of a gradient may be rounding noise, which is measured by the whole model. The same is
    true of the key's shared part in latent attention if nothing is rotated.
    """
    assert ours.keys() == theirs.keys()
    largest = max(t.abs().max().item() for t in theirs.values())
    far = {}
    for name, tensor in theirs.items():
        scale = tensor.abs().max().item()
        is_noise = name.endswith("key_rope.bias") and scale < close * largest
        if name.endswith("key.bias") or is_noise:
            scale = largest
        distance = (ours[name] - tensor).abs().max().item()
        if not distance <= close * scale:
            far[name] = distance / scale if scale else distance
    return far


def test_every_kind_of_folder_that_is_read_is_one_of_these_cases() -> None:
    kinds = {case.kind for case in CASES.values()}
    # as Gemma 4 in all that is computed
    assert FAMILIES.keys() - kinds == {"gemma4_unified_text"}


@pytest.mark.cases(len(CASES), sample=9)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "layout",
    [(1, 1, False), (2, 2, True), (2, 1, False), (2, 1, True), (1, 2, False)],
    ids=str,
)
def test_every_family_is_the_model_of_transformers(
    name: str, layout: tuple[int, int, bool], alike: list[dict[str, Any]]
) -> None:
    _, their_loss, expected = theirs(name)
    loss, found = ours(tuple(case["name"] for case in alike if case["layout"] == layout), *layout)[
        name
    ]
    close = 1e-10 if layout == (1, 1, False) else 1e-9
    assert loss == pytest.approx(their_loss, rel=close)
    assert not (far := differing(found, expected, close)), f"these differ: {far}"
    assert all(grad.any() for key, grad in expected.items() if "experts" not in key), (
        "a gradient is zero"
    )


def test_the_balance_loss_is_that_of_transformers_for_one_sample_and_one_layer() -> None:
    case = Case(
        "mixtral", {"num_local_experts": 4, "num_hidden_layers": 1}, {**MIXTRAL, "layers": 1}
    )
    job, _, expected = their_step(case, batch=1, aux=0.5)
    without = their_step(case, batch=1)[2]["layers.0.mlp.router.weight"]
    # theirs counts each token twice, ours once
    weighed = job.config.model_copy(update={"router_aux_loss": 0.5 * 2})
    _, found = step_all([Job(weighed, job.weights, job.tokens, job.targets)])[0]
    assert not (far := differing(found, expected, 1e-10)), f"these differ: {far}"
    assert not torch.allclose(without, expected["layers.0.mlp.router.weight"], rtol=1e-2), (
        "the loss did nothing"
    )
