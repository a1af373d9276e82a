"""Layers of one branch, with Mamba-2 mixers, are those of transformers' Nemotron-H, in models of odd
sizes drawn at random, whatever the layout."""

import pickle
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.precision.plan import plan
from models.attention import mamba_mixer, state_space
from models.attention.mamba_mixer import MambaMixer
from models.attention.state_space import chunked
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests.families import Answer, Case, Job, put, step_all, step_rank
from tests.layouts import assemble
from tests.models.test_delta_net import ours
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
    letters = [*dice.choice(("M*-", "M-*M", "*M-", "-M*", "MM*-M"))]
    if dice.random() < 0.5:
        dice.shuffle(letters)
    pattern = "".join(letters)
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
    mlp_bias = dice.random() < 0.5
    theirs = {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "head_dim": head_dim,
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
        "norm_eps": theirs["layer_norm_epsilon"],
        "mlp_bias": mlp_bias,
        "hybrid_pattern": pattern,
        "mamba": mamba,
    }
    return Case("nemotron_h", theirs, ours)


@cache
def theirs(seed: int) -> tuple[Job, float, dict[str, Tensor]]:
    return their_step(drawn(seed))


@pytest.mark.cases(3, sample=10)
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
        # Each feature in the place of its neighbour.
        whole = MambaMixer._convolve
        monkeypatch.setattr(
            MambaMixer, "_convolve", lambda self, x, begins: whole(self, x, begins).roll(1, -1)
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, False), (1, 2, False), (2, 2, True)], ids=str)
def test_layouts_train_the_model_of_transformers(layout: tuple[int, int, bool]) -> None:
    jobs = [theirs(seed)[0] for seed in TOGETHER]
    for seed, (loss, found) in zip(TOGETHER, step_all(jobs, *layout), strict=True):
        _, their_loss, expected = theirs(seed)
        assert loss == pytest.approx(their_loss, rel=IN_LAYOUTS), seed
        assert not (far := differing(found, expected, IN_LAYOUTS)), (seed, far)


RECOMPUTED = [
    Recompute(("norm", "attention", "activation")),
    Recompute(fraction=1.0),
]


@pytest.mark.parametrize("recompute", RECOMPUTED, ids=str)
def test_recomputation_changes_no_gradient(recompute: Recompute) -> None:
    job, _, expected = theirs(1)
    ((_, found),) = step_all([Job(job.config, job.weights, job.tokens, job.targets, recompute)])
    assert not (far := differing(found, expected, IN_LAYOUTS)), far


def misplaced(mesh: DeviceMesh, jobs: bytes) -> list[Answer]:
    """A step whose second rank convolves with the channels of its neighbours."""
    right = MambaMixer._convolve

    def convolve(self: MambaMixer, mixed: Tensor, begins: Tensor | None) -> Tensor:
        moved = self.context.tp.rank
        return right(self, mixed.roll(moved, -1), begins).roll(-moved, -1)

    MambaMixer._convolve = convolve
    try:
        return step_rank(mesh, jobs, False)
    finally:
        MambaMixer._convolve = right


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
    # transformers has least time steps in whole texts alone, not token by token
    keys |= {"time_step_min": 1e-9, "num_key_value_heads": 2, "intermediate_size": 40}
    config = transformers.AutoConfig.for_model("nemotron_h", **{**case.theirs, **keys})
    with float32_is_float64():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
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


def test_a_text_token_by_token_has_the_logits_of_the_whole() -> None:
    """With least time steps, which transformers does not have token by token."""
    job = next(
        theirs(seed)[0] for seed in range(9) if theirs(seed)[0].config.mamba.least_step > 0.1
    )
    _, found = ours(job)
    whole = found["logits"].t().unflatten(0, job.tokens.shape)
    stage = CachedStage(job.config, Context(plan("fp64")), cuts(job.config, 1, 16)[0])
    put(stage, job.weights)
    stage.start(job.tokens.shape[1], batch=len(job.tokens))
    for position, token in enumerate(job.tokens.t()):
        logits = stage.extend(token.unsqueeze(0))
        assert torch.allclose(logits, whole[:, position], rtol=0, atol=1e-11)
