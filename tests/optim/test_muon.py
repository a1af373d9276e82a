"""The laws of Muon: a plain loop over whole logical matrices, whatever a layout does to them."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megaprec.checkpoint.atomic import latest
from megaprec.checkpoint.save_load import load, save
from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon import matrix_updates, newton_schulz
from megaprec.optim.rules.muon.matrix_exchange import MatrixExchange
from megaprec.optim.rules.muon.newton_schulz import MatrixStack, orthogonalized
from megaprec.optim.rules.muon.rule import MUON_MOMENTUM, Muon
from megaprec.optim.rules.rule_table import rule
from megaprec.precision.plan import plan
from tests.layouts import Fragment, assemble, train_all
from tests.layouts import Run as Training
from tests.logical import (
    HEADS,
    SHAPES,
    Case,
    Tensors,
    differing,
    give,
    gradient,
    held,
    initial,
    make_optimizer,
    results,
    train,
)
from tests.optim.plain_muon import by_singular_values, plain
from tests.ranks import run_ranks
from tests.refusals import raises, sentence

CLOSE = 1e-12
STEPS = 5
BAD = 1
RESTART = 3
CLIP = 4.0
LR = 0.02
OPTIONS: dict[str, dict[str, Any]] = {
    "moonshot": {},
    "keller-jordan": {"scale": "keller-jordan", "nesterov": False, "momentum": 0.8},
    "every matrix": {
        "by_adamw": [],
        "ns_steps": 3,
        "ns_coefficients": [2.0, -1.5, 0.5],
        "betas": (0.8, 0.9),
    },
    "heads": {"per_head": True},
    "heads, keller-jordan": {"per_head": True, "scale": "keller-jordan", "nesterov": False},
}
LAYOUTS = [
    {"dp": 2, "tp": 2},
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
]
LAYOUTS += [{"dp": 4}, {"tp": 4}, {"dp": 3}]


def case(chosen: dict[str, Any], **changes: Any) -> Case:
    made = Case(
        "fp64", rule=("muon", chosen), clip=CLIP, steps=STEPS, bad=(BAD,), restart=RESTART, lr=LR
    )
    return replace(made, **changes)


def muon(**options: Any) -> Muon:
    made = rule("muon", options)
    assert isinstance(made, Muon)
    return made


@cache
def expected(name: str) -> Tensors:
    steps = [{n: gradient(n, step) for n in SHAPES} for step in range(STEPS) if step != BAD]
    chosen = muon(**OPTIONS[name])
    heads = HEADS if chosen.per_head else {}
    return plain(
        {n: initial(n, torch.float64) for n in SHAPES}, steps, chosen, LR, CLIP, heads=heads
    )


def require_close(ours: Tensors, theirs: Tensors, close: float = CLOSE) -> None:
    assert ours.keys() == theirs.keys()
    wrong = {n: float((ours[n] - w).abs().max()) for n, w in theirs.items()}
    assert not (wrong := {n: error for n, error in wrong.items() if not error <= close}), wrong


def require_plain(axes: dict[str, int]) -> None:
    for name, result in zip(
        OPTIONS, results([case(o) for o in OPTIONS.values()], axes), strict=True
    ):
        assert [r.outcome == "applied" for r in result.reports] == [
            step != BAD for step in range(STEPS)
        ]
        assert all(r.grad_norm > CLIP for r in result.reports if r.outcome == "applied")
        require_close(result.weights, expected(name))


def test_one_process_is_a_plain_loop_over_logical_matrices() -> None:
    """Clipped, with a skipped step, carried over into a new optimizer on the way; momentum and
    decay as published."""
    require_plain({})


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_matrix_is_whole_in_every_layout(axes: dict[str, int]) -> None:
    """Stacked query, key and value, keys that ranks share, padded and tied rows, columns that are
    cut; ZeRO-1."""
    require_plain(axes)


# --- these faults must be found by the law above


def the_stack_is_orthogonalized(patch: pytest.MonkeyPatch) -> None:
    """Query, key and value as one matrix, as they lie in their parameter."""
    inner = MatrixExchange.assemble

    def whole(self: MatrixExchange, received: Any) -> dict[int, Tensor]:
        made = inner(self, received)
        alike = [n for n in made if self.shapes[n] in ((8, 6), (4, 6))]
        assert len(alike) == 3
        stack = orthogonalized(torch.cat([made[n] for n in alike]))
        parts = stack.split([len(made[n]) for n in alike])
        return {n: orthogonalized(m) for n, m in made.items()} | dict(
            zip(alike, parts, strict=True)
        )

    patch.setattr(MatrixExchange, "assemble", whole)
    patch.setattr(matrix_updates, "orthogonalized", lambda matrix, *_: matrix)


def the_shard_is_orthogonalized(patch: pytest.MonkeyPatch) -> None:
    """Half of the rows, as a tensor-parallel rank or a rank of ZeRO-1 holds them."""

    def halves(matrix: Tensor, *how: Any) -> Tensor:
        parts = matrix.chunk(2, dim=-2)
        return torch.cat([orthogonalized(half, *how) for half in parts], dim=-2)

    patch.setattr(matrix_updates, "orthogonalized", halves)


def the_scale_is_of_the_transpose(patch: pytest.MonkeyPatch) -> None:
    factor = Muon.factor
    patch.setattr(Muon, "factor", lambda self, shape: factor(self, shape[::-1]))


def heads_are_interleaved(patch: pytest.MonkeyPatch) -> None:
    """Each head takes every fourth row, in place of four in a row."""

    def strided(self: MatrixStack, whole: Tensor) -> Tensor:
        return whole.view(self.rows, self.count, self.columns).transpose(0, 1).contiguous()

    patch.setattr(MatrixStack, "apart", strided)


def all_heads_have_one_norm(patch: pytest.MonkeyPatch) -> None:
    """A batch is divided by its norm, which is not that of each head."""

    def one_norm(matrix: Tensor, *how: Any) -> Tensor:
        if matrix.dim() == 2:
            return orthogonalized(matrix, *how)
        coefficients, steps, _ = how
        x = matrix / matrix.norm()
        for _ in range(steps):
            x = newton_schulz._iterate(x, coefficients)
        return x

    patch.setattr(matrix_updates, "orthogonalized", one_norm)


def the_scale_is_of_all_heads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MatrixStack, "shape", property(lambda self: self.whole))


def decay_is_scaled_too(patch: pytest.MonkeyPatch) -> None:
    move = matrix_updates._move

    def scaled(tile: Any, direction: Tensor, step: Any, scale: float) -> None:
        move(tile, direction, replace(step, weight_decay=step.weight_decay * scale), scale)

    patch.setattr(matrix_updates, "_move", scaled)


def momentum_is_forgotten_on_restart(patch: pytest.MonkeyPatch) -> None:
    load = ParallelAMPOptimizer.load_state_dict

    def load_but(self: ParallelAMPOptimizer, state: Any) -> None:
        load(self, state)
        for buffer in self.all_buffers():
            if MUON_MOMENTUM in buffer.state:
                buffer.state[MUON_MOMENTUM].zero_()

    patch.setattr(ParallelAMPOptimizer, "load_state_dict", load_but)


FAULTS = [
    the_stack_is_orthogonalized,
    the_shard_is_orthogonalized,
    the_scale_is_of_the_transpose,
    heads_are_interleaved,
    all_heads_have_one_norm,
    the_scale_is_of_all_heads,
    decay_is_scaled_too,
    momentum_is_forgotten_on_restart,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_it_is_noticed_if(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="weight"):
        require_plain({})


# --- the same bits everywhere

NONE = {"masters": "none", "rounding": "stochastic"}
KEPT: dict[str, Case] = {
    "fp32": case({}, compute="fp32"),
    "fp32, iterated in fp32": case({"ns_dtype": "fp32"}, compute="fp32"),
    "bf16": case({}, compute="bf16", options={"bucket": 20}),
    "split": case({"by_adamw": []}, compute="bf16", plan={"masters": "split", "moments": "bf16"}),
    "all bf16": case({}, compute="bf16", plan={**NONE, "moments": "bf16"}, fine=8),
    "heads": case({"per_head": True}, compute="bf16"),
    "some fp32": case({"ns_dtype": "fp64"}, compute="bf16", plan={"keep_fp32": ("output.*",)}),
}
# norms depend on the order of sums
KEPT = {name: replace(one, clip=0.0) for name, one in KEPT.items()}


@cache
def alone() -> dict[str, Any]:
    return dict(zip(KEPT, results([*KEPT.values()], {}), strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"zero_size": 1, "overlap": True}),
        ({"dp": 4}, {"zero_size": 1}),
        ({"dp": 4}, {"zero_size": 2}),
        ({"pp": 2, "dp": 2}, {"overlap": True}),
        ({"tp": 4}, {}),
        ({"pp": 2, "dp": 2, "tp": 2}, {}),
    ],
    ids=str,
)
def test_no_layout_changes_a_bit_whatever_is_kept(
    axes: dict[str, int], options: dict[str, Any]
) -> None:
    """Weights, what layers see, momentum and AdamW's moments; with and without ZeRO-1."""
    cases = [replace(one, options=one.options | options) for one in KEPT.values()]
    for name, result in zip(KEPT, results(cases, axes), strict=True):
        assert not (wrong := differing(result, alone()[name])), f"{name}: {wrong}"
        assert result.numbers == alone()[name].numbers


# --- state


def go_on(mesh: DeviceMesh | None, folder: Path, first: int) -> dict[str, list[Fragment]]:
    """Resumes, if it is not the first step, takes a step and saves."""
    optimizer = make_optimizer(mesh, KEPT["split"])
    if first:
        for buffer in optimizer.all_buffers():
            for values in (buffer.weights, *buffer.saved().values()):
                values.mul_(3)
        newest = latest(folder)
        assert newest is not None
        load(newest, optimizer)
    give(optimizer, first)
    optimizer.step(LR)
    save(folder, first + 1, optimizer, {}, keep=9)
    return held(optimizer)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2, "dp": 2}, {"dp": 3}], ids=str)
def test_a_run_resumes_in_any_layout_with_the_same_bits(
    axes: dict[str, int], tmp_path: Path
) -> None:
    go_on(None, tmp_path, 0)
    ranks = run_ranks(go_on, axes, folder=tmp_path, first=1)
    last = go_on(None, tmp_path, 2)
    (expected,) = results([replace(KEPT["split"], steps=3, bad=(), restart=None)], {})
    for kind, tensors in expected.kinds.items():
        assert all(
            torch.equal(values, tensors[n]) for n, values in assemble([last[kind]]).items()
        ), kind
    assert (
        assemble([rank.get("muon_momentum", []) for rank in ranks]).keys()
        == expected.kinds["muon_momentum"].keys()
    )


def test_a_state_has_the_momentum_of_matrices_and_the_moments_of_other_tensors_by_name() -> None:
    optimizer, _ = train(None, case({}, steps=2, clip=0.0, bad=(), restart=None))
    tensors: Tensors = optimizer.state_dict()["tensors"]
    kinds: dict[str, set[str]] = {}
    for key in tensors:
        kinds.setdefault(key.split("/")[0], set()).add(key.split("/")[1])
    hidden = {"query.weight", "key.weight", "value.weight", "output.weight"}
    rest = SHAPES.keys() - hidden
    assert kinds == {
        "weight": {*SHAPES},
        "muon_momentum": hidden,
        "exp_avg": rest,
        "exp_avg_sq": rest,
    }
    for n in hidden:
        mean = 0.95 * 0.05 * gradient(n, 0) + 0.05 * gradient(n, 1)
        torch.testing.assert_close(tensors[f"muon_momentum/{n}"], mean, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    "other", [("adamw", {}), ("sgd", {}), ("muon", {"by_adamw": ["embedding.*", "output.*"]})]
)
def test_a_checkpoint_of_another_rule_is_refused(
    other: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Also by Muon with other patterns: no tensor begins with a moment of another kind, or with
    none."""
    few = case({}, steps=1, bad=(), restart=None)
    saved = save(tmp_path, 1, train(None, replace(few, rule=other))[0], {})
    ours, _ = train(None, few)
    with pytest.raises(UserError, match="muon_momentum"):
        load(saved, ours)


# --- torch's class


@pytest.mark.parametrize(
    ("scale", "theirs"), [("keller-jordan", "original"), ("moonshot", "match_rms_adamw")]
)
def test_torchs_class_is_as_far_from_the_exact_iteration_as_we_are(scale: str, theirs: str) -> None:
    """torch.optim.Muon always iterates in bf16; its own error, against FP64, is the measure of
    ours."""
    shapes = [(48, 64), (64, 48), (96, 32)]
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in shapes]
    grads = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(3)]
    weights = nn.ParameterList(w.clone() for w in start)
    optimizer = torch.optim.Muon(
        weights, lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn=theirs
    )
    for step in grads:
        for w, g in zip(weights, step, strict=True):
            w.grad = g.clone()
        optimizer.step()
    bf16, fp64 = (trained(start, grads, scale=scale, ns_dtype=dtype) for dtype in ("bf16", "fp64"))
    for n, torchs in enumerate(weights):
        error = (torchs.detach() - fp64[n]).norm()
        assert 0 < error < 0.1 * (fp64[n] - start[n]).norm(), (
            "torch's own bf16 is not near the exact iteration"
        )
        assert (bf16[n] - fp64[n]).norm() < 1.5 * error
        assert (bf16[n] - torchs.detach()).norm() < 2 * error


def trained(start: list[Tensor], grads: list[list[Tensor]], **options: Any) -> list[Tensor]:
    net = nn.ParameterList(w.clone() for w in start)
    attach_whole(net)
    optimizer = ParallelAMPOptimizer(
        [net], plan("fp32"), rule=muon(by_adamw=[], **options), clip=0.0
    )
    for step in grads:
        for w, g in zip(net, step, strict=True):
            w.grad = g.clone()
        optimizer.step(LR)
    return [w.detach().clone() for w in net]


@pytest.mark.parametrize("shape", [(5, 5), (3, 17), (17, 3), (1, 4), (4, 1)], ids=str)
def test_the_iteration_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e3
    )
    require_close({"": orthogonalized(matrix)}, {"": by_singular_values(matrix, Muon())})
    assert torch.equal(orthogonalized(matrix * 0), matrix * 0)
    halves = orthogonalized(matrix.bfloat16())
    assert halves.dtype == torch.bfloat16 and (halves - orthogonalized(matrix)).abs().max() < 0.1


# --- models

SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 37,
}
MODELS = {
    "llama": {"family": "llama", **SIZES},
    "mixtral": {"family": "mixtral", **SIZES, "experts": 4},
    "gpt2, tied": {
        "family": "gpt2",
        **{k: v for k, v in SIZES.items() if k != "kv_heads"},
        "max_positions": 8,
    },
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(2, 1, 2), (1, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2)],
    ids=str,
)
def test_models_train_as_the_plain_loop_does_with_their_gradients(
    tp: int, pp: int, dp: int
) -> None:
    """Key heads that tensor-parallel ranks share, gate and up in one parameter, experts, a router,
    a tied head."""
    runs = [Training(model, options={"rule": Muon()}, clip=CLIP) for model in MODELS.values()]
    for name, run, result in zip(MODELS, runs, train_all(runs, tp, pp, dp), strict=True):
        clip = 0.0 if all(report.grad_norm < CLIP for report in result.reports) else CLIP
        theirs = plain(result.before, result.grads, Muon(), run.lr, clip)
        try:
            require_close(result.after, theirs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# --- models that torch has sharded


def one_model(shards: bool) -> Tensors:
    """Weights and moments after some steps. shards: its matrices are DTensors of odd sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 31), nn.GELU(), nn.Linear(31, 5))
    for part in (model[0], model[2], model) if shards else ():
        fully_shard(part)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer(
        [model], plan("fp32"), lr=LR, rule=Muon(by_adamw=(), ns_dtype="fp64")
    )
    for x in torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1)):
        (model(x).square().mean() * optimizer.scale).backward()
        optimizer.step()
    return optimizer.state_dict()["tensors"]


def train_sharded(mesh: DeviceMesh) -> Tensors:
    return one_model(shards=True)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("dp", [2, 4])
def test_matrices_that_fully_shard_has_cut_are_whole_too(dp: int) -> None:
    for found in run_ranks(train_sharded, {"dp": dp}):
        require_close(found, one_model(shards=False), 1e-6)


# --- what is refused

OPTION_ERRORS = [
    ({"momentum": 1.0}, sentence("optimizer.muon_momentum", momentum=1.0)),
    ({"momentum": "0.9"}, sentence("optimizer.muon_momentum", momentum="0.9")),
    ({"nesterov": 1}, sentence("optimizer.muon_nesterov", nesterov=1)),
    ({"ns_steps": 0}, sentence("optimizer.muon_steps", ns_steps=0)),
    ({"ns_eps": 0.0}, sentence("optimizer.muon_eps", ns_eps=0.0)),
    (
        {"ns_coefficients": "quintic"},
        sentence("optimizer.muon_numbers", key="ns_coefficients", values="quintic"),
    ),
    ({"ns_dtype": "fp16"}, sentence("optimizer.muon_dtype", ns_dtype="fp16")),
    (
        {"scale": "spectral"},
        sentence("optimizer.muon_scale", scale="spectral", scales="moonshot or keller-jordan"),
    ),
    ({"per_head": 4}, sentence("optimizer.muon_per_head", per_head=4)),
    ({"by_adamw": "head.*"}, sentence("optimizer.muon_patterns", key="by_adamw", values="head.*")),
    ({"lr": 0.1}, sentence("optimizer.rule_options", name="muon", option="lr")),
    ({"adamw": 1}, sentence("optimizer.rule_options", name="muon", option="adamw")),
    ({"betas": (0.9, 1.0)}, sentence("optimizer.betas")),
]


@pytest.mark.parametrize(("options", "message"), OPTION_ERRORS, ids=str)
def test_an_option_that_makes_no_sense_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rule("muon", options)


def test_an_embedding_that_is_frozen_is_told_from_hidden_layers_too() -> None:
    net = nn.Sequential(OrderedDict(embedding=nn.Embedding(5, 4), hidden=nn.Linear(4, 4)))
    net.embedding.requires_grad_(False)
    attach_whole(net)
    optimizer = ParallelAMPOptimizer([net], plan("fp32"), rule=Muon())
    assert optimizer.state_dict()["steps"] == 0


def test_patterns_that_do_not_fit_the_model_are_refused() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    attach_whole(net)
    with raises(
        "optimizer.muon_without_names",
        key="optimizer.options by_adamw",
        not_hidden=re.compile("^embedding"),
        names="0.weight",
    ):
        ParallelAMPOptimizer([net], plan("fp32"), rule=Muon())
    with raises(
        "precision.pattern_unmatched", key="optimizer.options by_adamw", pattern="2.weight"
    ):
        ParallelAMPOptimizer([net], plan("fp32"), rule=Muon(by_adamw=("0.weight", "2.weight")))
    assert (
        ParallelAMPOptimizer([net], plan("fp32"), rule=Muon(by_adamw=("0.weight",))).state_dict()[
            "steps"
        ]
        == 0
    )


def test_a_model_without_anything_to_train_is_refused_as_by_other_rules() -> None:
    net = nn.Linear(4, 4).requires_grad_(False)
    attach_whole(net)
    with raises("optimizer.nothing_to_train"):
        ParallelAMPOptimizer([net], plan("fp32"), rule=Muon())


def split(mesh: DeviceMesh | None) -> str:
    """The code of the refusal: one parameter of the first stage is query, key and value."""
    with pytest.raises(UserError) as raised:
        make_optimizer(mesh, case({"by_adamw": ["key.weight"]}))
    problem = raised.value.problems[0]
    assert "key.weight" in problem.fields["by_adamw"]
    return problem.code


@pytest.mark.cases(1)
@pytest.mark.parametrize("axes", [{}, {"pp": 2}], ids=str)
def test_a_parameter_is_of_one_rule_and_every_rank_says_so(axes: dict[str, int]) -> None:
    for code in run_ranks(split, axes) if axes else [split(None)]:
        assert code == "optimizer.muon_shared_parameter"
