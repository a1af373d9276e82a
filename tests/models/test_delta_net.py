"""Gated delta nets beside attention are those of transformers' Qwen3-Next, in models of odd sizes
drawn at random, whatever the layout."""

import pickle
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.attention import delta_rule, gated_delta_net
from models.attention.delta_rule import chunked
from models.attention.gated_delta_net import GatedDeltaNet
from models.attention.packing import Packing
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.families import Answer, Case, Job, Layout, put, step_all, step_rank
from tests.layouts import assemble
from tests.models.test_delta_rule import LateDecays, WithoutState
from tests.models.test_families import (
    differing,
    float32_is_float64,
    their_step,
    transformers,
)
from tests.ranks import run_ranks
from tools.convert.hf.folder import open_hf
from tools.convert.verify import read_weights

CLOSE = 1e-10
IN_LAYOUTS = 1e-9
SEEDS = pytest.mark.parametrize("seed", range(50))
TOGETHER = tuple(range(10))
GREEDY = 20


def drawn(seed: int) -> Case:
    """A model of a seed, as transformers and as megaprec describe it; two ranks can share it."""
    dice = random.Random(seed)
    layers = dice.choice((2, 3))
    types = [dice.random() < 0.6 for _ in range(layers)]
    # One of each kind: transformers keeps nothing of a text in a model without attention.
    types[:2] = dice.choice(((True, False), (False, True)))
    key_heads = dice.choice((1, 2, 4))
    value_heads = key_heads * dice.choice((1, 2, 3))
    value_heads *= 1 + value_heads % 2
    delta_net = {
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": dice.choice((1, 3, 6)),
        "value_dim": dice.choice((1, 4, 7)),
        "kernel": dice.choice((1, 2, 3, 5)),
    }
    experts = dice.choice((3, 4))
    dense = tuple(n for n in range(layers) if dice.random() < 0.25)[: layers - 1]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": dice.choice((20, 24, 30)),
        "head_dim": dice.choice((8, 12)),
        "num_key_value_heads": dice.choice((1, 2, 4)),
        "rms_norm_eps": dice.choice((1e-3, 1e-6)),
        "attention_bias": dice.random() < 0.3,
        "tie_word_embeddings": dice.random() < 0.3,
        "num_experts": experts,
        # the weight of one expert alone would be 1, and the router's gradient zero
        "num_experts_per_tok": dice.randint(2, experts),
        "norm_topk_prob": dice.random() < 0.7,
        "moe_intermediate_size": dice.choice((10, 16)),
        "shared_expert_intermediate_size": dice.choice((6, 18)),
        "mlp_only_layers": [*dense],
    }
    theirs = {
        **sizes,
        "layer_types": ["linear_attention" if one else "full_attention" for one in types],
        "linear_num_key_heads": delta_net["key_heads"],
        "linear_num_value_heads": delta_net["value_heads"],
        "linear_key_head_dim": delta_net["key_dim"],
        "linear_value_head_dim": delta_net["value_dim"],
        "linear_conv_kernel_dim": delta_net["kernel"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
        },
    }
    ours = {
        "layers": layers,
        "hidden": sizes["hidden_size"],
        "head_dim": sizes["head_dim"],
        "kv_heads": sizes["num_key_value_heads"],
        "norm_eps": sizes["rms_norm_eps"],
        "qkv_bias": sizes["attention_bias"],
        "output_bias": sizes["attention_bias"],
        "tied": sizes["tie_word_embeddings"],
        "experts": experts,
        "experts_per_token": sizes["num_experts_per_tok"],
        "norm_topk": sizes["norm_topk_prob"],
        "ffn": sizes["moe_intermediate_size"],
        "shared_experts": sizes["shared_expert_intermediate_size"],
        "shared_gate": True,
        "router_aux_loss": 0.0,
        "dense_layers": dense,
        "delta_net": delta_net,
        "delta_layers": tuple(n for n, one in enumerate(types) if one),
        "rope_base": 50.0,
        "rotary_fraction": 0.5,
    }
    # A width that no layer has may not be given.
    if dense:
        ours["dense_ffn"] = 40
    return Case("qwen3_next", theirs, ours)


@cache
def theirs(seed: int) -> tuple[Job, float, dict[str, Tensor]]:
    return their_step(drawn(seed))


def ours(job: Job, config: ModelConfig | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients by logical name with the logits among them, of one process."""
    config = config or job.config
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, job.tokens.shape[1])[0])
    put(stage, job.weights)
    samples = MicrobatchInfo(0, torch.arange(len(job.tokens)), torch.ones(()))
    logits = stage(job.tokens.t(), samples, Packing(job.documents))
    seen = logits.detach().transpose(0, 1).flatten(0, 1).t().clone()
    loss = stage.losses(logits, job.targets.t()).mean()
    loss.backward()
    found = {"logits": seen}
    for parameter in stage.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, first, last in layout_of(parameter).spans():
            found[part.name] = grad.view(-1)[first:last].view(part.shape)
    return loss.item(), found


@pytest.mark.cases(3, sample=10)
@SEEDS
def test_a_model_of_any_sizes_is_that_of_transformers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, their_loss, expected = theirs(seed)
    # Several chunks, of which the last has fewer tokens.
    monkeypatch.setattr(gated_delta_net, "chunked", partial(chunked, chunk=(5, 64)[seed % 2]))
    loss, found = ours(job)
    assert loss == pytest.approx(their_loss, rel=CLOSE)
    assert not (far := differing(found, expected, CLOSE)), far
    assert found["layers.0.attention_norm.weight"].any()


@pytest.mark.parametrize("fault", [LateDecays, WithoutState, "norms", "channels"])
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _, expected = theirs(0)
    config = job.config
    monkeypatch.setattr(gated_delta_net, "chunked", partial(chunked, chunk=5))
    if fault == "norms":
        config = config.model_copy(update={"norm_unit_offset": False})
    elif fault == "channels":
        # Each feature in the place of its neighbour.
        whole = GatedDeltaNet._convolve
        monkeypatch.setattr(
            GatedDeltaNet, "_convolve", lambda self, x, begins: whole(self, x, begins).roll(1, -1)
        )
    else:
        monkeypatch.setattr(delta_rule, "Decays", fault)
    _, found = ours(job, config)
    assert "logits" in differing(found, expected, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, False), (1, 2, False), (2, 2, True)], ids=str)
def test_layouts_train_the_model_of_transformers(layout: tuple[int, int, bool]) -> None:
    jobs = [theirs(seed)[0] for seed in TOGETHER]
    for seed, (loss, found) in zip(TOGETHER, step_all(jobs, *layout), strict=True):
        _, their_loss, expected = theirs(seed)
        assert loss == pytest.approx(their_loss, rel=IN_LAYOUTS), seed
        assert not (far := differing(found, expected, IN_LAYOUTS)), (seed, far)


def misplaced(mesh: DeviceMesh, jobs: bytes) -> list[Answer]:
    """A step whose second rank convolves with the channels of its neighbours."""
    right = GatedDeltaNet._convolve

    def convolve(self: GatedDeltaNet, mixed: Tensor, begins: Tensor | None) -> Tensor:
        moved = self.context.tp.rank
        return right(self, mixed.roll(moved, -1), begins).roll(-moved, -1)

    GatedDeltaNet._convolve = convolve
    try:
        return step_rank(mesh, jobs, Layout(tp=2))
    finally:
        GatedDeltaNet._convolve = right


@pytest.mark.slow
def test_channels_that_are_cut_wrongly_are_found() -> None:
    job, _, expected = theirs(0)
    answers = run_ranks(misplaced, {"pp": 1, "tp": 2}, jobs=pickle.dumps([job]))
    found = assemble([[*one.grads, *one.logits] for (one,) in answers])
    assert "logits" in differing(found, expected, IN_LAYOUTS)


@pytest.mark.cases(1, sample=4)
@SEEDS
def test_greedy_texts_are_those_that_transformers_generates(seed: int, tmp_path: Path) -> None:
    case = drawn(seed)
    keys = {"vocab_size": 97, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model("qwen3_next", **case.theirs, **keys)
    with float32_is_float64():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.eval().save_pretrained(tmp_path)
        prompt = torch.randint(97, (1, 7))
        length = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY}
        said = model.generate(prompt, **length, do_sample=False)
    source = open_hf(tmp_path)
    stage = CachedStage(source.model, Context(plan("fp64")), cuts(source.model, 1, 64)[0])
    read_weights(stage, source)
    stage.start(prompt.shape[1] + GREEDY)
    ids = prompt[0].tolist()
    piece = prompt.t()
    for _ in range(GREEDY):
        ids.append(int(stage.extend(piece)[0].argmax()))
        piece = torch.tensor([[ids[-1]]])
    assert ids == said[0].tolist()
