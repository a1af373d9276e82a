"""Weights that are kept in FP8 alone: their codes are those of the masters, in every layout, and
train like them.

Whoever keeps weights in FP32 makes codes of the masters themselves, once a pass; weights kept in
FP8 must not train otherwise, to the last bit. The norm of the gradients is summed buffer by buffer,
and there are other buffers: so nothing is clipped here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.fp8.params import FP8Masters, FP8ParamShard, fp8_param_of
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import LossScaling, plan
from models.engine.engine import Engine
from parallel.activation_checkpoint import Recompute
from tests.fp8.test_training import EXPERTS, fp8, run
from tests.layouts import Run, batches, make_engine, share_of, train_all
from tests.ranks import run_ranks
from tests.refusals import raises
from tests.runs import checkpoint, losses, rewind, steps, tensors, train, train_on, write_run

KINDS: list[Kind] = ["delayed", "current", "blockwise"]


def kept(
    kind: Kind = "delayed", compute: str = "bf16", codes: bool = True, **others: object
) -> Run:
    """Weights in FP8, or in FP32 and cast to FP8 for each pass."""
    made = run(fp8(kind, parameters=codes, pad=True), compute, clip=0.0, **others)
    return replace(made, changes={"parameters": "fp32", **made.changes})


def engine_of(one: Run, mesh: DeviceMesh | None = None) -> Engine:
    if one.before is not None:
        one.before()
    return make_engine(mesh, one)


def state_of(engine: Engine) -> dict[str, Tensor]:
    return engine.optimizer.state_dict()["tensors"]


def require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


def pairs() -> Iterator[Run]:
    yield from (kept(kind, steps=2, micro_batch=4) for kind in KINDS)
    yield kept("current", steps=2, micro_batch=4, zero_size=1)
    yield kept("delayed", steps=2, micro_batch=4, options={"overlap": True, "bucket": 20_000})
    yield kept("current", model=EXPERTS, steps=2, micro_batch=4, recompute=Recompute(fraction=1.0))


def require_trains_as_weights_in_fp32(axes: dict[str, int], runs: Sequence[Run]) -> None:
    wide = [
        replace(one, changes={**one.changes, "fp8": replace(one.changes["fp8"], parameters=False)})
        for one in runs
    ]
    results = train_all([*runs, *wide], **axes)
    for one, ours, theirs in zip(runs, results[: len(runs)], results[len(runs) :], strict=True):
        assert [r.loss for r in ours.reports] == [r.loss for r in theirs.reports], one
        require_same(ours.after, theirs.after)
        assert any(
            not torch.equal(values, ours.before[name]) for name, values in ours.after.items()
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_training_is_bit_for_bit_that_of_weights_kept_in_fp32(axes: dict[str, int]) -> None:
    require_trains_as_weights_in_fp32(axes, list(pairs()))


@dataclass(frozen=True)
class Coded:
    """A rank's slice of a logical weight, as its layer sees it: codes, read as bytes, and scales
    undone."""

    name: str
    dim: int | None
    shard: int
    codes: Tensor
    inverse: Tensor


def codes_rank(mesh: DeviceMesh | None, one: Run, state: dict[str, Tensor]) -> list[Coded]:
    """What the layers hold in the second pass after the state was taken up."""
    engine = engine_of(one, mesh)
    engine.optimizer.load_state_dict({**engine.optimizer.saved_numbers(), "tensors": state})
    for _ in range(2):
        with engine.fp8.autocast():
            engine.optimizer.wait()
    found = []
    for stage in engine.stages.values():
        for parameter in stage.parameters():
            if (held := fp8_param_of(parameter)) is not None:
                first = 0
                for part in layout_of(parameter).parts:
                    rows = parameter.data[first : first + part.padded[0]].view(torch.uint8).clone()
                    found.append(Coded(part.name, part.dim, part.shard, rows, held.inverse.clone()))
                    first += part.padded[0]
    return found


def assembled(ranks: Sequence[Sequence[Coded]]) -> dict[str, Tensor]:
    """Codes of logical tensors; every rank that holds a slice must hold the same, with the same
    scale."""
    slices: dict[str, dict[int, Coded]] = {}
    for one in (one for rank in ranks for one in rank):
        known = slices.setdefault(one.name, {}).setdefault(one.shard, one)
        assert torch.equal(known.codes, one.codes) and torch.equal(known.inverse, one.inverse), (
            one.name
        )
    whole = {}
    for name, parts in slices.items():
        some = [parts[n] for n in sorted(parts)]
        assert all(torch.equal(part.inverse, some[0].inverse) for part in some), (
            f"{name} has several scales"
        )
        whole[name] = torch.cat([part.codes for part in some], some[0].dim or 0)
        whole[f"{name} inverse"] = some[0].inverse
    return whole


def noise(one: Run) -> dict[str, Tensor]:
    """Weights in place of the initial ones, whose largest lie in different places of each
    tensor."""
    generator = torch.Generator().manual_seed(1)
    state = state_of(engine_of(replace(one, before=None)))
    return {
        name: torch.randn(values.shape, generator=generator).pow(3)
        for name, values in state.items()
    }


def expected(state: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """By hand: what is stacked in one parameter shares one scale, the largest magnitude's."""
    made = {}
    for name in (name for name in names if not name.endswith(" inverse")):
        stack = [name]
        if ".mlp." in name and "down" not in name:
            stack = [name.replace("up", "gate"), name.replace("gate", "up")]
        elif "attention.output" not in name and ".attention." in name:
            stack = [name.replace(name.split(".")[3], which) for which in ("query", "key", "value")]
        scale = (
            torch.tensor(448.0)
            / torch.stack([state[f"weight/{other}"].abs().max() for other in stack]).max()
        )
        made[name] = (
            (state[f"weight/{name}"] * scale)
            .clamp(-448, 448)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
        made[f"{name} inverse"] = scale.reciprocal().view(1, 1)
    return made


def require_codes_of_the_masters(one: Run, **axes: int) -> None:
    state = noise(one)
    ours = assembled(run_ranks(codes_rank, axes, one=one, state=state))
    require_same(ours, expected(state, list(ours)))


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("axes", [{}, {"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_codes_are_the_masters_rounded_with_one_scale_for_a_logical_tensor(
    axes: dict[str, int], kind: Kind
) -> None:
    require_codes_of_the_masters(kept(kind), **axes)


@pytest.mark.slow
def test_blocks_that_slices_cut_through_have_the_scales_of_one_process() -> None:
    one = kept("blockwise", model={**kept().model, "hidden": 128, "ffn": 320})
    state = noise(one)
    alone = assembled([codes_rank(None, one, state)])
    assert alone["layers.0.mlp.down.weight inverse"].unique().numel() == 3
    for zero_size in (0, 1, 2):
        ours = assembled(
            run_ranks(codes_rank, {"dp": 4}, one=replace(one, zero_size=zero_size), state=state)
        )
        require_same(ours, alone)


def test_scales_that_replicas_do_not_agree_on_are_still_one_for_a_weight() -> None:
    one = kept("delayed")
    recipe = replace(one.changes["fp8"], reduce_amax=False)
    require_codes_of_the_masters(replace(one, changes={**one.changes, "fp8": recipe}), dp=2, tp=2)


def count_bytes(mesh: DeviceMesh, one: Run) -> int:
    """Bytes that the weights of one step travel in."""
    engine = engine_of(one, mesh)
    inner = Axis.start_gather_
    travelled = 0

    def counted(self: Axis, flat: Tensor) -> Callable[[], object]:
        nonlocal travelled
        travelled += flat.nbytes
        return inner(self, flat)

    batch = share_of(mesh, batches(one)[0])
    engine.step(batch, 1e-2, 0)
    Axis.start_gather_ = counted
    try:
        engine.step(batch, 1e-2, 1)
    finally:
        Axis.start_gather_ = inner
    return travelled


@pytest.mark.slow
def test_what_is_collected_are_codes_once_a_step() -> None:
    """Half the bytes of bf16: one byte less for each weight in FP8."""
    ours = replace(kept(), changes={"fp8": kept().changes["fp8"]})
    wide = replace(ours, changes={"fp8": replace(ours.changes["fp8"], parameters=False)})
    (narrow, *_), (bf16, *_) = (run_ranks(count_bytes, {"dp": 2}, one=one) for one in (ours, wide))
    model = ours.config
    coded = model.layers * (
        2 * model.hidden**2 + 2 * model.hidden * model.hidden // 2 + 3 * model.hidden * model.ffn
    )
    assert bf16 - narrow == pytest.approx(coded, abs=300), "up to the padding of buffers"


@pytest.mark.slow
def test_an_evaluation_sees_the_weights_of_the_last_step_and_changes_nothing() -> None:
    def trained(one: Run) -> tuple[list[float], dict[str, Tensor]]:
        engine = engine_of(one)
        said = []
        for n, batch in enumerate(batches(one)):
            engine.step(share_of(None, batch), one.lr, n)
            said.append(engine.evaluate(share_of(None, batch)))
        return said, state_of(engine)

    (ours, state), (theirs, expected_state) = trained(kept()), trained(kept(codes=False))
    assert ours == theirs and len(set(ours)) == len(ours)
    require_same(state, expected_state)
    plain = train_all([kept()])[0]
    assert all(torch.equal(plain.after[name], state[f"weight/{name}"]) for name in plain.after)


@pytest.mark.slow
def test_a_skipped_step_is_run_again_with_its_own_codes() -> None:
    """The scale falls until half precision holds; each skipped step is looked into."""
    scaling = LossScaling("dynamic", initial=2.0**20, hysteresis=1)
    runs = [kept(compute="fp16", codes=codes, scaling=scaling, steps=6) for codes in (True, False)]
    ours, theirs = (train_all([one])[0] for one in runs)
    assert {r.outcome for r in ours.reports} == {"applied", "skipped_overflow"}
    told = [
        [(r.outcome, r.loss, r.loss_scale) for r in result.reports] for result in (ours, theirs)
    ]
    assert told[0] == told[1]
    require_same(ours.after, theirs.after)


def test_products_outside_of_fp8_are_made_of_what_the_codes_stand_for() -> None:
    """With E4M3's numbers for weights, rounding loses nothing, and a pass without FP8 is that of a
    model without it."""
    ours = engine_of(kept("current", "fp32"))
    plain = engine_of(run(None, "fp32", clip=0.0))
    state = state_of(plain)
    for name, values in state.items():
        if name.startswith("weight/layers") and values.dim() == 2:
            values.copy_((values * 448 / 0.1).clamp(-448, 448).to(torch.float8_e4m3fn).float())
            values[0, 0] = 448
            values *= 2.0**-12
    for engine in (ours, plain):
        engine.optimizer.load_state_dict({**engine.optimizer.saved_numbers(), "tensors": state})
    x = batches(kept())[0][0].t().contiguous()
    with torch.no_grad(), ours.fp8.autocast(enabled=False):
        assert torch.equal(ours.stages[0](x), plain.stages[0](x))


def test_stale_codes_are_not_used_outside_of_a_pass() -> None:
    engine = engine_of(kept())
    engine.step(share_of(None, batches(kept())[0]), 1e-2, 0)
    with pytest.raises(RuntimeError, match="stored in FP8, and its codes are out of date"):
        engine.stages[0](torch.zeros(4, 1, dtype=torch.int64))


def test_codes_in_other_memory_are_refused_and_wide_weights_are_moved_home() -> None:
    """Codes without the scales that belong to them are no values."""
    engine = engine_of(kept())
    seen = set[bool]()
    for buffer in engine.optimizer.all_buffers():
        assert buffer.reclaim_parameters() == []
        parameter = buffer.parameters[0]
        parameter.data = parameter.data.clone()
        first_part = layout_of(parameter).parts[0].name
        expected = [first_part] if buffer.has_fp8_weights else []
        assert buffer.reclaim_parameters() == expected
        seen.add(buffer.has_fp8_weights)
    assert seen == {True, False}


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_formula_of_bytes_holds(compute: str) -> None:
    """bf16: 1 for codes, 4 for the gradient, 12 for master and averages; scales come on top."""
    engine = engine_of(replace(kept(compute=compute), changes={"fp8": kept().changes["fp8"]}))
    for buffer in engine.optimizer.all_buffers():
        whole, cut = engine.optimizer.plan.bytes_per_parameter(2, in_fp8=buffer.has_fp8_weights)
        assert whole + cut == (17 if buffer.has_fp8_weights else 18)
        scales = 4 * len(buffer.parameters) if buffer.has_fp8_weights else 0
        assert buffer.num_bytes() == buffer.size * (whole + cut) + scales
    assert {buffer.has_fp8_weights for buffer in engine.optimizer.all_buffers()} == {True, False}


def test_split_masters_are_whole_where_no_bf16_weight_has_the_other_half() -> None:
    changes = {"fp8": kept().changes["fp8"], "masters": "split"}
    ours, theirs = train_all(
        [replace(kept(), changes=changes), replace(kept(), changes={"fp8": changes["fp8"]})]
    )
    require_same(ours.after, theirs.after)


def test_what_cannot_be_kept_in_fp8_is_refused() -> None:
    for kind in ("rowwise", "mx"):
        with pytest.raises(UserError, match=f"with fp8.kind = {kind} a weight has different codes"):
            FP8State.over(None, FP8Recipe(kind, parameters=True), 1)
    with raises("precision.fp8_masters"):
        plan("bf16", masters="none", fp8=FP8Recipe(parameters=True))
    with raises("fp8.parameters_calibrated"):
        FP8Recipe(parameters=True, calibrate=1)


# Known bugs, each of which must break a law above


def scales_stay_on_a_replica() -> None:
    inner = Axis.max_
    Axis.max_ = lambda self, tensor: tensor if self.name in ("dp", "zero") else inner(self, tensor)


def amaxes_stay_on_a_tensor_rank() -> None:
    inner = Axis.max_
    Axis.max_ = lambda self, tensor: tensor if self.name == "tp" else inner(self, tensor)


def codes_are_made_once() -> None:
    inner = FP8ParamShard.encode
    made = set()

    def encode(self: FP8ParamShard, amax: Tensor, records: bool) -> None:
        if self.param.name not in made:
            inner(self, amax, records)
        made.add(self.param.name)

    FP8ParamShard.encode = encode


def codes_travel_no_more() -> None:
    FP8Masters.renew = lambda self, records: None


@pytest.mark.parametrize(
    ("bug", "axes"), [(scales_stay_on_a_replica, "dp"), (amaxes_stay_on_a_tensor_rank, "tp")]
)
def test_a_scale_that_is_not_everyones_is_noticed(bug: Callable[[], None], axes: str) -> None:
    with pytest.raises(AssertionError):
        require_codes_of_the_masters(replace(kept("current"), before=bug), **{axes: 2})


@pytest.mark.parametrize("bug", [codes_are_made_once, codes_travel_no_more])
def test_stale_codes_are_noticed(bug: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        require_trains_as_weights_in_fp32(
            {"dp": 2}, [replace(kept("current", steps=2), before=bug)]
        )


# Through the command

KEYS = (
    "fp8.kind=delayed",
    "fp8.pad=true",
    "fp8.history_length=8",
    "precision.compute=bf16",
    "log.progress=false",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("fp8_weights"))


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_exchanges_checkpoints_with_runs_that_keep_wide_weights(
    file: Path, tmp_path: Path
) -> None:
    codes = (*KEYS, "fp8.parameters=true")
    wide = (*KEYS, "precision.parameters=fp32")
    clip = ("optimizer.clip=0.0", "checkpoint.keep=9")
    whole = train_on(file, *codes, *clip, f"train.folder={tmp_path / 'whole'}", data=2)
    for name, keys in (("again", codes), ("wide", wide)):
        other = train_on(
            file, *keys, *clip, f"train.folder={rewind(whole, tmp_path / name, 3)}", data=2
        )
        found = tensors(checkpoint(other, 6))
        meant = tensors(checkpoint(whole, 6))
        assert found.keys() == meant.keys()
        if name == "again":
            assert steps(other) == steps(whole)
            require_same(found, meant)
        assert losses(other)[3] == losses(whole)[3] or name == "wide"
    layout = train_on(
        file, *codes, *clip, f"train.folder={rewind(whole, tmp_path / 'other', 3)}", tensor=2
    )
    assert losses(layout)[3:] == pytest.approx(losses(whole)[3:], rel=1e-2)
    back = train_on(
        file,
        *codes,
        *clip,
        f"train.folder={rewind(tmp_path / 'wide', tmp_path / 'back', 3)}",
        data=2,
    )
    require_same(tensors(checkpoint(back, 6)), tensors(checkpoint(whole, 6)))


@pytest.mark.slow
def test_a_run_says_what_its_weights_take(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train(
            file, *KEYS, "fp8.parameters=true", "train.steps=1", f"train.folder={tmp_path / 'run'}"
        )
        == 0
    )
    assert (
        "memory     5 + 12 = 17 bytes a parameter kept in FP8, 6 + 12 = 18 bytes"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_nemos_recipe_keeps_weights_in_fp8_as_it_says(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = "precision.nemo.recipe=bf16_with_fp8_current_scaling_mixed"
    wide = "precision.nemo.first_last_layers_bf16=false"
    assert train(file, recipe, wide, "train.steps=1", f"train.folder={tmp_path / 'run'}") == 0
    said = capsys.readouterr().out
    assert "products of 8 of 8 weights" in said and "17 bytes a parameter kept in FP8" in said
