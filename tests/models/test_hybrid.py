"""Layers of one branch, with Mamba-2 mixers and experts, are those of transformers' Nemotron-H, in
models of odd sizes drawn at random, whatever the layout."""

import pickle
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.precision.plan import plan
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.recurrent import mamba_mixer, state_space
from models.recurrent.mamba_mixer import MambaMixer
from models.recurrent.state_space import chunked
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests.convert.test_transformers import SPEED, their_training
from tests.families import (
    ADAM_EPS,
    ADAM_LR,
    BATCH,
    Case,
    Job,
    Layout,
    put,
    step_all,
    train_all,
)
from tests.layouts import assemble
from tests.models.test_families import (
    corrections,
    differing,
    float32_is_float64,
    logical,
    their_model,
    their_step,
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
SEEDS = pytest.mark.parametrize("seed", range(50))
TOGETHER = [range(first, first + 10) for first in range(0, 50, 10)]
PATTERNS = ("M*-", "M-*M", "*M-", "-M*", "MM*-M", "ME*", "ME*-", "E*ME", "*EM-E", "MEE-*M")
STEPS = 3


def drawn_experts(dice: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Experts, as transformers and as megaprec describe them; two ranks can share them."""
    groups, of_group = dice.choice(((1, 4), (1, 6), (2, 2), (2, 3), (4, 2)))
    chosen_groups = dice.randint(1, groups)
    # the weight of one expert alone would be 1, and the router's gradient zero
    chosen = dice.randint(2, min(4, chosen_groups * of_group))
    theirs = {
        "n_routed_experts": groups * of_group,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": chosen_groups,
        "norm_topk_prob": dice.random() < 0.7,
        "routed_scaling_factor": dice.choice((1.0, 2.5)),
        "moe_intermediate_size": dice.choice((8, 12, 20)),
        "moe_shared_expert_intermediate_size": dice.choice((4, 16, 28)),
    }
    ours = {
        "experts": theirs["n_routed_experts"],
        "experts_per_token": chosen,
        "norm_topk": theirs["norm_topk_prob"],
        "ffn": theirs["moe_intermediate_size"],
        "shared_experts": theirs["moe_shared_expert_intermediate_size"],
        "router_aux_loss": 0.0,
        "router": {
            "score": "sigmoid",
            "correction": True,
            "scale": theirs["routed_scaling_factor"],
            "groups": groups,
            "groups_per_token": chosen_groups,
        },
    }
    return theirs, ours


def drawn(seed: int) -> Case:
    """A model of a seed, as transformers and as megaprec describe it; two ranks can share it."""
    dice = random.Random(seed)
    letters = [*dice.choice(PATTERNS)]
    if dice.random() < 0.5:
        dice.shuffle(letters)
    pattern = "".join(letters)
    has_experts = "E" in pattern
    groups = dice.choice((2, 4))
    mamba = {
        "heads": groups * dice.choice((1, 2, 3)),
        "head_dim": dice.choice((1, 4, 7)),
        "state_dim": dice.choice((1, 3, 6)),
        "groups": groups,
        "kernel": dice.choice((1, 2, 3, 5)),
        # above some time steps and below others
        "least_step": dice.choice((1e-9, 0.3)),
    }
    hidden = dice.choice((20, 24, 30))
    head_dim = dice.choice((5, 8))
    kv_heads = dice.choice((1, 2, 4))
    # of experts there are none
    mlp_bias = dice.random() < 0.5 and not has_experts
    theirs = {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "layer_norm_epsilon": dice.choice((1e-3, 1e-6)),
        "mlp_bias": mlp_bias,
        "mamba_num_heads": mamba["heads"],
        "mamba_head_dim": mamba["head_dim"],
        "ssm_state_size": mamba["state_dim"],
        "n_groups": groups,
        "conv_kernel": mamba["kernel"],
        "time_step_min": mamba["least_step"],
        "chunk_size": dice.choice((4, 5, 128)),
    }
    ours = {
        "layers": len(pattern),
        "hidden": hidden,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "norm_eps": theirs["layer_norm_epsilon"],
        "mlp_bias": mlp_bias,
        "hybrid_pattern": pattern,
        "mamba": mamba,
    }
    if has_experts:
        their_experts, our_experts = drawn_experts(dice)
        theirs |= their_experts
        ours |= our_experts
    # A width that no layer has may not be given.
    if has_experts and "-" in pattern:
        ours["dense_ffn"] = 40
    return Case("nemotron_h", theirs, ours)


@cache
def theirs(seed: int) -> tuple[Job, float, dict[str, Tensor]]:
    return their_step(drawn(seed), documents=drawn_documents(BATCH, seed % 2 == 1, seed))


@pytest.mark.cases(3, sample=3)
@SEEDS
def test_a_model_of_any_sizes_is_that_of_transformers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, their_loss, expected = theirs(seed)
    # Several chunks, of which the last has fewer tokens.
    monkeypatch.setattr(mamba_mixer, "chunked", partial(chunked, chunk=(5, 64)[seed % 2]))
    loss, found = ours(job)
    assert loss == pytest.approx(their_loss, rel=CLOSE)
    assert not (far := differing(found, expected, CLOSE)), far


@pytest.mark.parametrize("fault", [LateDecays, WithoutState, "channels", "groups"])
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _, expected = theirs(0)
    monkeypatch.setattr(mamba_mixer, "chunked", partial(chunked, chunk=5))
    if fault == "channels":
        convolve_neighbours(monkeypatch, MambaMixer)
    elif fault == "groups":
        # All features normalized together.
        normalize = MambaMixer._normalize
        monkeypatch.setattr(
            MambaMixer, "_normalize", lambda self, x: normalize(self, x * x.abs().mean(-1, True))
        )
        monkeypatch.setattr("models.mamba.Mamba.group_width", 1)
    else:
        monkeypatch.setattr(state_space, "Decays", fault)
    _, found = ours(job)
    assert "logits" in differing(found, expected, CLOSE)


LAYOUTS = [
    Layout(2, 2, sequence=True),
    Layout(dp=2, expert=2),
    Layout(2),
    Layout(1, 2, kind="zb-h1"),
    Layout(2, dp=2, expert=2, sequence=True),
    Layout(2, 1, 1, expert=2, expert_tensor=1),
    Layout(1, 2, 2, expert=2, kind="gpipe"),
    Layout(2, 2, 2, expert=2, expert_tensor=1, sequence=True),
    Layout(4, 2, sequence=True),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("seeds", TOGETHER, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_train_the_model_of_transformers(layout: Layout, seeds: range) -> None:
    jobs = {seed: theirs(seed)[0] for seed in seeds}
    # of those that so many ranks can share
    shared = {seed: job for seed, job in jobs.items() if job.config.divides_recurrence(layout.tp)}
    for seed, trained in zip(shared, train_all([*shared.values()], layout), strict=True):
        _, their_loss, expected = theirs(seed)
        assert trained.losses == pytest.approx([their_loss], rel=IN_LAYOUTS), seed
        assert not (far := differing(trained.found, expected, IN_LAYOUTS)), (seed, far)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("seeds", TOGETHER, ids=str)
@pytest.mark.parametrize("layout", [Layout(), LAYOUTS[-2]], ids=str)
def test_three_steps_are_those_of_transformers(layout: Layout, seeds: range) -> None:
    """Corrections of routers, which transformers does not train, follow the loads of each step."""
    jobs = []
    expected = []
    for seed in seeds:
        job, _, _ = their_step(drawn(seed))
        speed = {"router_correction_speed": SPEED}
        config = job.config.model_copy(update=speed)
        jobs.append(replace(job, config=config, steps=STEPS, lr=ADAM_LR))
        ids = torch.cat((job.tokens[:, :1], job.targets), 1)
        with float32_is_float64():
            model = their_model(drawn(seed))
            losses = their_training(model, [ids] * STEPS, ADAM_LR, ADAM_EPS)
        trained = {**dict(model.named_parameters()), **dict(corrections(model))}
        weights = logical(model.config, {name: w.detach() for name, w in trained.items()})
        expected.append((losses, weights))
    answers = train_all(jobs, layout)
    for seed, trained, (their_losses, right) in zip(seeds, answers, expected, strict=True):
        assert trained.losses == pytest.approx(their_losses, rel=IN_LAYOUTS), seed
        assert not (far := differing(trained.weights, right, IN_LAYOUTS)), (seed, far)


RECOMPUTED = [
    Recompute(("norm", "attention", "activation")),
    Recompute(fraction=1.0),
]


@pytest.mark.parametrize("recompute", RECOMPUTED, ids=str)
def test_recomputation_changes_no_gradient(recompute: Recompute) -> None:
    job, _, expected = theirs(1)
    ((_, found),) = step_all([replace(job, recompute=recompute)])
    assert not (far := differing(found, expected, IN_LAYOUTS)), far


@pytest.mark.slow
def test_channels_that_are_cut_wrongly_are_found() -> None:
    job, _, expected = theirs(0)
    answers = run_ranks(misplaced, {"pp": 1, "tp": 2}, jobs=pickle.dumps([job]), mixer=MambaMixer)
    found = assemble([[*one.grads, *one.logits] for (one,) in answers])
    assert "logits" in differing(found, expected, IN_LAYOUTS)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(("seed", "greedy"), [(0, 20), *((seed, 200) for seed in range(50))])
def test_greedy_texts_are_those_that_transformers_generates(
    seed: int, greedy: int, tmp_path: Path
) -> None:
    case = drawn(seed)
    keys = {"vocab_size": 97, "num_attention_heads": 4, "max_position_embeddings": 256}
    # transformers has least time steps in whole texts alone, not token by token
    keys |= {"time_step_min": 1e-9, "intermediate_size": 40}
    # No token is padding, and none ends the text.
    keys |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model("nemotron_h", **{**case.theirs, **keys})
    with float32_is_float64():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for _, correction in corrections(model):
            torch.nn.init.normal_(correction, std=0.1)
        model.eval().save_pretrained(tmp_path)
        prompt = torch.randint(97, (1, 7))
        said = model.generate(prompt, max_new_tokens=greedy, do_sample=False)
    assert continued(tmp_path, prompt, greedy) == said[0].tolist()


def test_a_text_token_by_token_has_the_logits_of_the_whole() -> None:
    """With least time steps, which transformers does not have token by token."""
    whole_samples = (theirs(seed)[0] for seed in range(0, 50, 2))
    job = next(job for job in whole_samples if job.config.mamba.least_step > 0.1)
    _, found = ours(job)
    whole = found["logits"].t().unflatten(0, job.tokens.shape)
    stage = CachedStage(job.config, Context(plan("fp64")), cuts(job.config, 1, 16)[0])
    put(stage, job.weights)
    stage.start(job.tokens.shape[1], batch=len(job.tokens))
    for position, token in enumerate(job.tokens.t()):
        logits = stage.extend(token.unsqueeze(0))
        assert torch.allclose(logits, whole[:, position], rtol=0, atol=1e-11)
