"""Gated delta nets beside attention are those of transformers' Qwen3-Next and Qwen3.5, and Kimi
Delta Attention beside latent attention that of Kimi Linear, in models of odd sizes drawn at random,
whatever the layout.

Of packed documents transformers computes each one by itself.
"""

import math
import pickle
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.recurrent import delta_rule, gated_delta_net
from models.recurrent.delta_rule import chunked
from models.recurrent.gated_delta_net import GatedDeltaNet
from tests.families import (
    ADAM_EPS,
    ADAM_LR,
    Case,
    Job,
    Layout,
    Trained,
    config_of,
    train_all,
)
from tests.layouts import assemble
from tests.models.test_families import (
    corrections,
    counting,
    data,
    differing,
    float32_is_float64,
    logical,
    their_model,
    transformers,
)
from tests.ranks import run_ranks
from tests.recurrent.beside_transformers import (
    continued,
    convolve_neighbours,
    drawn_documents,
    misplaced,
    ours,
)
from tests.recurrent.recurrences import LateDecays, WithoutState

CLOSE = 1e-10
IN_LAYOUTS = 1e-9
KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
# Tokens of a chunk that sequences have several of; of Kimi Linear's a power of two.
SHORT_CHUNK = {**dict.fromkeys(KINDS, 5), "kimi_linear": 4}
# The first four are one of each kind.
DRAWN = [(kind, seed) for seed in range(50) for kind in KINDS]
BATCH = 4
STEPS = 3
# tp, pp, dp, sequence parallelism
LAYOUTS = [
    (1, 1, 1, False),
    (2, 1, 1, False),
    (1, 2, 1, False),
    (1, 1, 2, False),
    (2, 2, 1, True),
    (2, 1, 2, True),
    (1, 2, 2, False),
    (4, 1, 1, False),
    (1, 4, 1, False),
    (1, 1, 4, False),
    (2, 2, 2, True),
    (4, 2, 1, True),
    (4, 1, 2, False),
    (2, 4, 1, False),
    (1, 4, 2, False),
    (1, 2, 4, False),
    (2, 1, 4, False),
]
TOGETHER = 15
GREEDY = 200


def drawn(kind: str, seed: int) -> Case:
    """A model of a seed, as transformers and as megaprec describe it."""
    dice = random.Random(f"{kind} {seed}")
    if kind == "kimi_linear":
        return drawn_kimi(dice)
    layers = dice.choice((2, 3, 4, 5))
    is_delta = [dice.random() < 0.6 for _ in range(layers)]
    layer_keys: dict[str, Any] = {
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_delta]
    }
    if dice.random() < 0.5:
        interval = dice.choice((1, 2, 3, 4, 6))
        is_delta = [(number + 1) % interval > 0 for number in range(layers)]
        layer_keys = {"full_attention_interval": interval}
    ranks = dice.choice((1, 2, 4))  # that can share heads and widths
    kv_heads = dice.choice((1, ranks, 3 * ranks))
    heads = math.lcm(kv_heads, ranks) * dice.choice((1, 2, 3))
    key_heads = dice.choice((1, ranks, 3 * ranks))
    delta_net = {
        "key_heads": key_heads,
        "value_heads": math.lcm(key_heads, ranks) * dice.choice((1, 2, 3)),
        # One feature has no direction near 0, where gradients are as inexact as it is in itself.
        "key_dim": dice.choice((2, 3, 6)),
        "value_dim": dice.choice((2, 4, 7)),
        "kernel": dice.choice((1, 2, 3, 5)),
    }
    # Widths of heads of which a fraction is an even number.
    head_dim, fraction = dice.choice(((8, 0.25), (8, 0.5), (8, 0.75), (12, 0.5), (6, 1.0)))
    base = dice.choice((50.0, 1e4))
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": dice.choice((20, 23, 24, 30)),
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": dice.choice((1e-3, 1e-6)),
        "attention_bias": dice.random() < 0.3,
        "tie_word_embeddings": dice.random() < 0.4,
    }
    theirs = {
        **sizes,
        **layer_keys,
        "linear_num_key_heads": delta_net["key_heads"],
        "linear_num_value_heads": delta_net["value_heads"],
        "linear_key_head_dim": delta_net["key_dim"],
        "linear_value_head_dim": delta_net["value_dim"],
        "linear_conv_kernel_dim": delta_net["kernel"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": base,
            "partial_rotary_factor": fraction,
        },
    }
    ours: dict[str, Any] = {
        "layers": layers,
        "hidden": sizes["hidden_size"],
        "heads": heads,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "norm_eps": sizes["rms_norm_eps"],
        "qkv_bias": sizes["attention_bias"],
        "output_bias": sizes["attention_bias"],
        "tied": sizes["tie_word_embeddings"],
        "rope_base": base,
        "rotary_fraction": fraction,
    }
    delta_layers = tuple(number for number, one in enumerate(is_delta) if one)
    # Sizes that no layer has may not be given.
    if delta_layers:
        ours |= {"delta_net": delta_net, "delta_layers": delta_layers}
    if kind == "qwen3_5_text":
        width = ranks * dice.choice((7, 10))
        return Case(kind, {**theirs, "intermediate_size": width}, {**ours, "ffn": width})
    their_experts, our_experts = drawn_experts(dice, kind, layers, ranks)
    return Case(kind, {**theirs, **their_experts}, {**ours, **our_experts})


def drawn_experts(
    dice: random.Random, kind: str, layers: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Experts as transformers and as megaprec describe them: in all layers, and of qwen3_next in
    some."""
    experts = dice.choice((3, 4, 6))
    theirs = {
        "num_experts": experts,
        # the weight of one expert alone would be 1, and the router's gradient zero
        "num_experts_per_tok": dice.randint(2, experts),
        "moe_intermediate_size": ranks * dice.choice((3, 4)),
        "shared_expert_intermediate_size": ranks * dice.choice((2, 5)),
    }
    ours: dict[str, Any] = {
        "experts": experts,
        "experts_per_token": theirs["num_experts_per_tok"],
        "ffn": theirs["moe_intermediate_size"],
        "shared_experts": theirs["shared_expert_intermediate_size"],
        "shared_gate": True,
        "router_aux_loss": 0.0,
    }
    if kind != "qwen3_next":
        return theirs, ours
    dense = [number for number in range(layers) if dice.random() < 0.25][: layers - 1]
    normalized = dice.random() < 0.7
    theirs |= {"mlp_only_layers": dense, "norm_topk_prob": normalized, "intermediate_size": 40}
    ours |= {"dense_layers": tuple(dense), "norm_topk": normalized}
    # A width that no layer has may not be given.
    if dense:
        ours["dense_ffn"] = 40
    return theirs, ours


def drawn_kimi(dice: random.Random) -> Case:
    """A model with Kimi Delta Attention, latent attention, or both."""
    layers = dice.choice((2, 3, 4, 5))
    is_delta = [dice.random() < 0.6 for _ in range(layers)]
    ranks = dice.choice((1, 2, 4))  # that can share heads and widths
    width = dice.choice((2, 3, 6))
    delta_heads = ranks * dice.choice((1, 2, 3))
    kernel = dice.choice((1, 2, 3, 5))
    heads = ranks * dice.choice((1, 2))
    latent = {
        "kv_rank": dice.choice((5, 14)),
        "query_rank": dice.choice((0, 9)),
        "rope_dim": dice.choice((2, 4)),
        "nope_dim": dice.choice((3, 10)),
        "value_dim": dice.choice((3, 6)),
    }
    is_dense = [dice.random() < 0.3 for _ in range(layers)]
    groups = dice.choice((1, 2, 3))
    chosen_groups = dice.randint(1, groups)
    experts = groups * dice.choice((2, 3))
    per_token = dice.randint(2, chosen_groups * experts // groups)
    ffn = ranks * dice.choice((3, 4))
    scale = dice.choice((1.0, 2.446))
    sizes = {
        "hidden_size": dice.choice((20, 23, 24, 30)),
        "rms_norm_eps": dice.choice((1e-3, 1e-6)),
        "attention_bias": dice.random() < 0.3,
        "moe_renormalize": dice.random() < 0.7,
    }
    theirs = {
        **sizes,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent["kv_rank"],
        "q_lora_rank": latent["query_rank"] or None,
        "qk_rope_head_dim": latent["rope_dim"],
        "qk_nope_head_dim": latent["nope_dim"],
        "v_head_dim": latent["value_dim"],
        "linear_num_heads": delta_heads,
        "linear_head_dim": width,
        "linear_conv_kernel_dim": kernel,
        "layer_types": ["linear_attention" if one else "full_attention" for one in is_delta],
        "mlp_layer_types": ["dense" if one else "sparse" for one in is_dense],
        "num_experts": experts,
        "num_experts_per_token": per_token,
        "num_expert_group": groups,
        "topk_group": chosen_groups,
        "num_shared_experts": 2,
        "moe_intermediate_size": ffn,
        "routed_scaling_factor": scale,
    }
    ours: dict[str, Any] = {
        "layers": layers,
        "hidden": sizes["hidden_size"],
        "heads": heads,
        "kv_heads": heads,
        "norm_eps": sizes["rms_norm_eps"],
        "qkv_bias": sizes["attention_bias"],
        "output_bias": sizes["attention_bias"],
        "latent": latent,
    }
    delta_net = {
        "key_heads": delta_heads,
        "value_heads": delta_heads,
        "key_dim": width,
        "value_dim": width,
        "gate_rank": width,
        "kernel": kernel,
    }
    delta_layers = tuple(number for number, one in enumerate(is_delta) if one)
    if delta_layers:
        ours |= {"delta_net": delta_net, "delta_layers": delta_layers}
    if all(is_dense):
        return Case("kimi_linear", theirs, ours)
    ours |= {
        "experts": experts,
        "experts_per_token": per_token,
        "norm_topk": sizes["moe_renormalize"],
        "ffn": ffn,
        "shared_experts": 2 * ffn,
        "router_aux_loss": 0.0,
        # transformers trains no corrections
        "router_correction_speed": 0.0,
        "router": {
            "score": "sigmoid",
            "correction": True,
            "scale": scale,
            "groups": groups,
            "groups_per_token": chosen_groups,
        },
        "dense_layers": tuple(number for number, one in enumerate(is_dense) if one),
    }
    if any(is_dense):
        ours["dense_ffn"] = 40
    return Case("kimi_linear", theirs, ours)


def their_logits(model: nn.Module, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Logits [b, s, vocab], of each document by itself."""
    # A cache would need a layer with attention.
    if documents is None:
        return model(tokens, use_cache=False).logits
    rows = []
    for sample, numbers in zip(tokens, documents, strict=True):
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
        pieces = [model(piece[None], use_cache=False).logits[0] for piece in sample.split(lengths)]
        rows.append(torch.cat(pieces))
    return torch.stack(rows)


@cache
def theirs(kind: str, seed: int) -> tuple[Job, Trained]:
    """What our layers are to do, and what they are to come to: steps of torch's AdamW, which decays
    matrices."""
    tokens, targets = data(BATCH)
    documents = drawn_documents(BATCH, seed % 2 == 0, seed)
    losses: list[float] = []
    found: dict[str, Tensor] = {}
    with float32_is_float64():
        model = their_model(drawn(kind, seed))
        parameters = dict(model.named_parameters())
        kept = dict(corrections(model))
        counts = counting(model)
        weights = logical(
            model.config, {name: p.detach().clone() for name, p in (parameters | kept).items()}
        )
        # Kimi Linear's rates are [1, 1, heads, 1].
        is_matrix = {name: p.dim() > 1 and "A_log" not in name for name, p in parameters.items()}
        matrices = [p for name, p in parameters.items() if is_matrix[name]]
        vectors = [p for name, p in parameters.items() if not is_matrix[name]]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=ADAM_LR, betas=(0.9, 0.95), eps=ADAM_EPS, foreach=False
        )
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            logits = their_logits(model, tokens, documents)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            losses.append(loss.item())
            grads = {}
            for name, p in parameters.items():
                # without a gradient a parameter would not be decayed
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                grads[name] = p.grad.clone()
            if not found:
                loads = {name: count.clone() for name, count in counts.items()}
                found = logical(model.config, grads | loads)
                found["logits"] = logits.detach().flatten(0, 1).t()
            optimizer.step()
    after = logical(model.config, {name: p.detach() for name, p in (parameters | kept).items()})
    config = config_of(drawn(kind, seed))
    job = Job(config, weights, tokens, targets, documents=documents, steps=STEPS, lr=ADAM_LR)
    return job, Trained(losses, found, after)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("kind", "seed"), DRAWN)
def test_a_model_of_any_sizes_is_that_of_transformers(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, expected = theirs(kind, seed)
    # Several chunks, of which the last has fewer tokens.
    chunk = SHORT_CHUNK[kind] if seed % 3 == 0 else 64
    monkeypatch.setattr(gated_delta_net, "chunked", partial(chunked, chunk=chunk))
    loss, found = ours(job)
    assert loss == pytest.approx(expected.losses[0], rel=CLOSE)
    assert not (far := differing(found, expected.found, CLOSE)), far
    assert found["layers.0.attention_norm.weight"].any()


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("fault", [LateDecays, WithoutState, "norms", "channels"])
def test_a_planted_fault_is_found(kind: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, expected = theirs(kind, 0)
    config = job.config
    monkeypatch.setattr(gated_delta_net, "chunked", partial(chunked, chunk=SHORT_CHUNK[kind]))
    if fault == "norms":
        config = config.model_copy(update={"norm_unit_offset": not config.norm_unit_offset})
    elif fault == "channels":
        convolve_neighbours(monkeypatch, GatedDeltaNet)
    else:
        by_row = config.delta_net.gate_rank > 0
        monkeypatch.setattr(delta_rule, "RowDecays" if by_row else "Decays", fault)
    _, found = ours(job, config)
    assert "logits" in differing(found, expected.found, CLOSE)


def fits(config: ModelConfig, tp: int, pp: int) -> bool:
    """True if so many ranks can share the model evenly."""
    widths = [config.heads, config.ffn, config.shared_experts]
    if config.dense_layers:
        widths.append(config.dense_ffn)
    shares_keys = config.kv_heads % tp == 0 or tp % config.kv_heads == 0
    divided = all(width % tp == 0 for width in widths) and config.delta_net.divides(tp)
    return divided and shares_keys and pp <= config.layers


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("first", range(0, len(DRAWN), TOGETHER))
def test_layouts_train_the_models_of_transformers(
    first: int, layout: tuple[int, int, int, bool]
) -> None:
    tp, pp, dp, sequence = layout
    models = [theirs(*one) for one in DRAWN[first : first + TOGETHER]]
    fitting = [(job, expected) for job, expected in models if fits(job.config, tp, pp)]
    jobs = [job for job, _ in fitting]
    for trained, (job, expected) in zip(
        train_all(jobs, Layout(tp, pp, dp, sequence)), fitting, strict=True
    ):
        assert trained.losses == pytest.approx(expected.losses, rel=IN_LAYOUTS), job.config
        for found, others in ((trained.found, expected.found), (trained.weights, expected.weights)):
            assert not (far := differing(found, others, IN_LAYOUTS)), (job.config, far)


def test_most_layouts_fit_several_drawn_models() -> None:
    for tp, pp, *_ in LAYOUTS:
        fitting = [one for one in DRAWN if fits(config_of(drawn(*one)), tp, pp)]
        assert len(fitting) >= 20, (tp, pp)


@pytest.mark.slow
def test_channels_that_are_cut_wrongly_are_found() -> None:
    configs = [config_of(drawn(*one)) for one in DRAWN]
    shared = [bool(config.delta_layers) and fits(config, 2, 1) for config in configs]
    job, expected = theirs(*DRAWN[shared.index(True)])
    answers = run_ranks(
        misplaced, {"pp": 1, "tp": 2}, jobs=pickle.dumps([job]), mixer=GatedDeltaNet
    )
    found = assemble([[*one.grads, *one.logits] for (one,) in answers])
    assert "logits" in differing(found, expected.found, IN_LAYOUTS)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("kind", "seed"), DRAWN)
def test_greedy_texts_are_those_that_transformers_generates(
    kind: str, seed: int, tmp_path: Path
) -> None:
    case = drawn(kind, seed)
    # the defaults of Kimi Linear are ids beyond the vocabulary
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    keys = {"vocab_size": 97, "max_position_embeddings": 256, **ids}
    config = transformers.AutoConfig.for_model(kind, **case.theirs, **keys)
    with float32_is_float64():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.eval().save_pretrained(tmp_path)
        prompt = torch.randint(97, (1, 7))
        # transformers keeps nothing of a text in a model without attention
        has_attention = "full_attention" in config.layer_types
        said = model.generate(
            prompt,
            max_new_tokens=GREEDY,
            min_new_tokens=GREEDY,
            do_sample=False,
            use_cache=has_attention,
        )
    assert continued(tmp_path, prompt, GREEDY) == said[0].tolist()
