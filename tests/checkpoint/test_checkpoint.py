"""The laws of checkpoints: any layout reads what any other wrote, and a checkpoint is whole or it
is not there."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import INDEX, begin, checkpoints, latest, partial_path
from megaprec.checkpoint.digests import FILE_DIGESTS, INDEX_DIGEST
from megaprec.checkpoint.keeping import RECORD
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load, save
from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import LossScaling, plan
from tests.layouts import Fragment, Run, assemble, batches, fragments, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.refusals import sentence

KINDS = ("weight", "exp_avg", "exp_avg_sq")
Layout = tuple[int, int, int]  # tp, pp, dp
Held = dict[str, list[Fragment]]  # by kind, what one rank holds

# Each layout saves a checkpoint and loads those of all that come before it; the first comes again
# at the end.
CHAIN: list[Layout] = [(2, 2, 2), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]
MODEL = MODELS["gpt2"]


def held(optimizer: ParallelAMPOptimizer) -> Held:
    return {
        kind: fragments(optimizer.all_buffers(), lambda buffer, kind=kind: buffer.saved()[kind])
        for kind in KINDS
    }


def all_tensors(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    return [
        t for buffer in optimizer.all_buffers() for t in (buffer.weights, *buffer.saved().values())
    ]


def spoil(optimizer: ParallelAMPOptimizer) -> None:
    """Changes all that a checkpoint has to bring back. Padding stays zero."""
    for tensor in all_tensors(optimizer):
        tensor.mul_(3)


def weights_are_rounded_masters(optimizer: ParallelAMPOptimizer) -> bool:
    return all(
        torch.equal(b.own_weights, b.saved()["weight"].to(b.weights.dtype))
        for b in optimizer.all_buffers()
    )


def save_and_load(
    mesh: DeviceMesh, run: Run, folder: Path, earlier: list[str], name: str
) -> dict[str, Held]:
    """Saves as `name`, then loads every other; what this rank then holds, by checkpoint."""
    engine = make_engine(mesh, run)
    for step, batch in enumerate(batches(run)):
        engine.step(share_of(mesh, batch), run.lr, step)
    path = save(folder / name, len(batches(run)), engine.optimizer, {"who": name})
    found = {name: held(engine.optimizer)}
    assert path == latest(folder / name)
    for other in earlier:
        spoil(engine.optimizer)
        path = latest(folder / other)
        assert path is not None
        assert load(path, engine.optimizer)["who"] == other
        assert weights_are_rounded_masters(engine.optimizer)
        assert engine.optimizer.saved_numbers()["steps"] == len(batches(run))
        found[other] = held(engine.optimizer)
    return found


@pytest.mark.slow
def test_what_one_layout_saves_every_other_loads_bit_for_bit(tmp_path: Path) -> None:
    """Masters and both moments. ZeRO is on in every other layout."""
    saved: dict[str, dict[str, dict[str, Tensor]]] = {}
    for number, (tp, pp, dp) in enumerate(CHAIN):
        name = f"{number} tp{tp} pp{pp} dp{dp}"
        run = Run(MODEL, "bf16", steps=2, zero_size=number % 2)
        axes = {"pp": pp, "dp": dp, "tp": tp}
        ranks = run_ranks(
            save_and_load, axes, run=run, folder=tmp_path, earlier=list(saved), name=name
        )
        for other in ranks[0]:
            together = {kind: assemble([rank[other][kind] for rank in ranks]) for kind in KINDS}
            for kind, tensors in saved.setdefault(other, together).items():
                assert together[kind].keys() == tensors.keys()
                assert all(torch.equal(together[kind][n], t) for n, t in tensors.items()), (
                    f"{kind} of {other} in {name}"
                )
        require_no_pickle(tmp_path / name)


def require_no_pickle(folder: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".jsonl":
            assert all(json.loads(line) for line in file.read_text().splitlines())
        else:
            assert file.suffix == ".safetensors"
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                json.loads(opened.read(length))


SEARCHING = LossScaling("dynamic", initial=2.0**20, backoff_factor=2.0**-4, growth_interval=3)


def resume_and_compare(
    mesh: DeviceMesh, folder: Path, before: Callable[[], None] | None = None
) -> None:
    """Interrupted after each of several steps, the steps that follow are the same to the last
    bit."""
    if before is not None:
        before()
    for compute, scaling in (("fp16", SEARCHING), ("bf16", None)):
        run = Run(MODEL, compute, scaling, steps=5)
        engine = make_engine(mesh, run)
        shares = [share_of(mesh, batch) for batch in batches(run)]
        reports = []
        for step, share in enumerate(shares):
            save(folder / compute, step, engine.optimizer, {}, keep=len(shares))
            reports.append(engine.step(share, run.lr, step))
        assert len({r.outcome for r in reports}) == (2 if scaling else 1), (
            "the scaler is to be caught in its search"
        )
        for first, zero_size in ((1, 0), (2, 1), (4, 0)):
            resumed = make_engine(mesh, replace(run, zero_size=zero_size))
            spoil(resumed.optimizer)
            path = checkpoints(folder / compute)[first]
            assert load(path, resumed.optimizer)["step"] == first
            again = [resumed.step(shares[step], run.lr, step) for step in range(first, len(shares))]
            assert str(again) == str(reports[first:]), (
                f"{compute} resumed before step {first}, {zero_size=}"
            )
            assert resumed.optimizer.saved_numbers() == engine.optimizer.saved_numbers()
            for ours, theirs in zip(
                resumed.optimizer.all_buffers(), engine.optimizer.all_buffers(), strict=True
            ):
                assert torch.equal(ours.weights, theirs.weights)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    """With ZeRO switched off and on again on the way."""
    run_ranks(resume_and_compare, {"pp": 2, "dp": 2, "tp": 2}, folder=tmp_path)


def load_what_one_stage_cannot(mesh: DeviceMesh, folder: Path) -> None:
    optimizer = make_engine(mesh, Run(MODEL, "bf16")).optimizer
    path = save(folder, 1, optimizer, {})
    if mesh.get_rank() == 0:
        change_index(lambda index: index["tensors"].pop("exp_avg/final_norm.weight"), path)
    optimizer.world.barrier()
    spoil(optimizer)
    if mesh.get_local_rank("pp"):
        message = sentence("checkpoint.part_missing", key="exp_avg/final_norm.weight")
    else:
        message = sentence("checkpoint.load_failed_elsewhere")
    require_refused(path, optimizer, message)


def test_what_one_rank_cannot_load_every_rank_refuses(tmp_path: Path) -> None:
    run_ranks(load_what_one_stage_cannot, {"pp": 2}, folder=tmp_path)


class Small(nn.Module):
    """Of every number of dims that a parameter may have, also none."""

    def __init__(self, width: int, extra: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(width, 3)
        self.conv = nn.Conv1d(2, width, 3)
        if extra:
            self.extra = nn.Parameter(torch.zeros(1))


def small(width: int = 5, extra: bool = False) -> ParallelAMPOptimizer:
    model = Small(width, extra)
    attach_whole(model)
    return ParallelAMPOptimizer([model], plan("fp16"))


def saved(folder: Path, step: int = 1, value: float = 1.0, keep: int = 2) -> Path:
    optimizer = small()
    for tensor in all_tensors(optimizer):
        tensor.fill_(value)
    optimizer.applied_steps.fill_(step)
    return save(folder, step, optimizer, {}, keep)


def holds(optimizer: ParallelAMPOptimizer, value: float) -> bool:
    return all(
        (fragment.values == value).all() for some in held(optimizer).values() for fragment in some
    )


def require_refused(path: Path, optimizer: ParallelAMPOptimizer, message: str) -> None:
    before = [t.clone() for t in all_tensors(optimizer)]
    numbers = optimizer.saved_numbers()
    with pytest.raises(UserError, match=message):
        load(path, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(all_tensors(optimizer), before, strict=True)), (
        "something was loaded"
    )
    assert optimizer.saved_numbers() == numbers


@pytest.mark.parametrize(
    ("width", "extra", "message"),
    [
        (
            6,
            False,
            sentence("checkpoint.other_model_tensors", num_different=3, num_local=5)
            + r"\n(.*\n)*"
            + sentence(
                "checkpoint.other_model_shape",
                name="linear.weight",
                shape=[3, 6],
                saved_shape=[3, 5],
            ),
        ),
        (
            5,
            True,
            sentence("checkpoint.other_model_tensors", num_different=1, num_local=6)
            + r"\n"
            + sentence("checkpoint.other_model_shape", name="extra", shape=[1], saved_shape="not"),
        ),
    ],
)
def test_tensors_that_differ_are_named(
    tmp_path: Path, width: int, extra: bool, message: str
) -> None:
    require_refused(saved(tmp_path), small(width, extra), message)


def test_a_checkpoint_with_more_in_it_is_of_another_model(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(extra=True), {})
    require_refused(
        path, small(), sentence("checkpoint.other_model_size", elements=55, expected=54)
    )


def change_index(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    """Of a checkpoint as an earlier version saved it: without digests, which would tell of any
    change."""
    index = json.loads((path / INDEX).read_text())
    for key in (INDEX_DIGEST, FILE_DIGESTS):
        index.pop(key, None)
    change(index)
    (path / INDEX).write_text(json.dumps(index))


def truncate(name: str, path: Path) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])


def scramble(path: Path) -> None:
    file = path / "optimizer-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


def point_outside(index: dict[str, Any]) -> None:
    index["tensors"]["exp_avg/scale"]["chunks"][0]["file"] = "../elsewhere.safetensors"


def list_outside(index: dict[str, Any]) -> None:
    index["files"]["../x"] = 1


def lose_moment(index: dict[str, Any]) -> None:
    del index["tensors"]["exp_avg_sq/scale"]


def lose_chunk(index: dict[str, Any]) -> None:
    index["tensors"]["weight/linear.weight"]["chunks"] = []


def of_another_shape(index: dict[str, Any]) -> None:
    index["tensors"]["weight/linear.weight"]["chunks"][0]["shape"] = [5, 3]


def set_groups(*groups: object) -> Callable[[Path], object]:
    """A checkpoint whose learning rates are these."""
    return partial(change_index, lambda index: index["optimizer"].update(param_groups=[*groups]))


GROUP = {"factors": [1.0, 1.0], "lr": 0.1, "weight_decay": 0.0}

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, sentence("checkpoint.not_a_checkpoint")),
    "no index": (lambda path: (path / INDEX).unlink(), sentence("checkpoint.not_a_checkpoint")),
    "cut index": (partial(truncate, INDEX), sentence("checkpoint.not_a_checkpoint")),
    "index of bytes": (
        lambda path: (path / INDEX).write_bytes(b"\xff\xfe\x00"),
        sentence("checkpoint.not_a_checkpoint"),
    ),
    "index is a list": (
        lambda path: (path / INDEX).write_text("[1]"),
        sentence("checkpoint.unknown_format", version=None),
    ),
    "index is a number": (
        lambda path: (path / INDEX).write_text("1"),
        sentence("checkpoint.unknown_format", version=None),
    ),
    "another format": (
        partial(change_index, lambda index: index.update(format=3)),
        sentence(
            "checkpoint.newer_version",
            why=re.compile(" checkpoint format 3, and this one reads up to 2"),
        ),
    ),
    "no tensors": (
        partial(change_index, lambda index: index.pop("tensors")),
        "damaged.*\ntensors: Field required",
    ),
    "no files": (
        partial(change_index, lambda index: index.pop("files")),
        "damaged.*\nfiles: Field required",
    ),
    "no scaler": (
        partial(change_index, lambda index: index["optimizer"].pop("scaler")),
        "damaged.*\noptimizer.scaler",
    ),
    "a rate of truth": (
        set_groups({**GROUP, "lr": True}),
        r"damaged.*\noptimizer.param_groups.0.lr",
    ),
    "a rate below zero": (
        set_groups(GROUP, {**GROUP, "weight_decay": -0.1}),
        r"damaged.*\noptimizer.param_groups.1.weight_decay",
    ),
    "a group of another kind": (
        set_groups([]),
        r"damaged.*\noptimizer.param_groups.0: Input should be",
    ),
    "a group without factors": (
        set_groups({"lr": 0.1}),
        r"damaged.*\noptimizer.param_groups.0.factors: Field required",
    ),
    "no moment": (
        partial(change_index, lose_moment),
        sentence("checkpoint.part_missing", key="exp_avg_sq/scale"),
    ),
    "no chunk": (
        partial(change_index, lose_chunk),
        sentence("checkpoint.tensor_incomplete", key=re.compile(r"weight/linear\.weight")),
    ),
    "another shape": (
        partial(change_index, of_another_shape),
        sentence("checkpoint.part_missing", key="weight/linear.weight"),
    ),
    "cut tensors": (
        partial(truncate, "model-00000.safetensors"),
        sentence("checkpoint.file_size", file=re.compile(r"model-00000\.safetensors")),
    ),
    "no tensors file": (
        lambda path: (path / "optimizer-00000.safetensors").unlink(),
        sentence("checkpoint.file_size"),
    ),
    "scrambled tensors": (
        scramble,
        sentence("checkpoint.part_range", path=re.compile(r"optimizer-00000\.safetensors")),
    ),
    "file outside": (
        partial(change_index, list_outside),
        sentence("checkpoint.file_outside", name="../x"),
    ),
    "chunk outside": (
        partial(change_index, point_outside),
        sentence("checkpoint.file_missing", name="../elsewhere.safetensors"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(tmp_path: Path, damage: str) -> None:
    do, message = DAMAGES[damage]
    path = saved(tmp_path)
    shutil.copy(path / "optimizer-00000.safetensors", tmp_path / "elsewhere.safetensors")
    change_index(lambda index: None, path)
    do(path)
    require_refused(path, small(), message)


def test_parameters_of_any_number_of_dims_come_back(tmp_path: Path) -> None:
    before = small()
    after = small()
    for tensor in all_tensors(before):
        tensor.normal_()
    load(save(tmp_path, 1, before, {}), after)
    for kind in KINDS:
        ours = assemble([held(after)[kind]])
        theirs = assemble([held(before)[kind]])
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), kind
    store = Store(checkpoints(tmp_path)[0])
    assert set(store.shapes("exp_avg")) == {
        "scale",
        "linear.weight",
        "linear.bias",
        "conv.weight",
        "conv.bias",
    }
    assert store.read("weight", "conv.weight").shape == (5, 2, 3)


def names(folder: Path) -> list[str]:
    """All names in a folder, without its record of saves."""
    return sorted(p.name for p in folder.iterdir() if p.name != RECORD)


def test_an_interrupted_save_is_never_taken_and_the_next_one_removes_it(tmp_path: Path) -> None:
    whole = saved(tmp_path, step=3)
    for step, files in ((4, ["model-00000.safetensors"]), (5, ["model-00000.safetensors", INDEX])):
        leftover = partial_path(tmp_path, step, begin(tmp_path, step))
        for file in files:
            shutil.copy(whole / file, leftover)
    (tmp_path / "step_00000009.mine").mkdir()  # no checkpoint: it has not the name of one
    assert checkpoints(tmp_path) == [whole] == [latest(tmp_path)]
    (tmp_path / "step_00000009.mine").rmdir()
    saved(tmp_path, step=6)
    assert names(tmp_path) == ["step_00000003", "step_00000006"]


def test_only_the_newest_stay_and_the_one_just_written_always(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    for step in (1, 2, 99999999, 100000000):
        saved(tmp_path, step)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_99999999", "step_100000000"]
    assert latest(tmp_path) == tmp_path / "step_100000000"
    saved(tmp_path, 3)  # a run that was taken back to an earlier step
    assert [p.name for p in checkpoints(tmp_path)] == [
        "step_00000003",
        "step_99999999",
        "step_100000000",
    ]
    saved(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step_00000005", "step_100000000"]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    optimizer = small()
    for value in (1.0, 2.0):
        load(saved(tmp_path, 7, value), optimizer)
        assert holds(optimizer, value)
    assert names(tmp_path) == ["step_00000007"]


class Killed(BaseException):
    """Nothing of the library catches it."""


OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "shutil.copyfile",
}


def save_and_die_everywhere(mesh: DeviceMesh, folder: Path) -> None:
    """Saves again and again and is stopped before the first operation on files, before the second,
    and so on."""
    left: int | None = None

    def count(event: str, arguments: object) -> None:
        nonlocal left
        if left is not None and event in OPERATIONS:
            left -= 1
            if left < 0:
                left = None
                raise Killed

    sys.addaudithook(count)
    step = 1
    optimizer = small()
    saved(folder, step)
    for again in (0, 1):  # the next step, or the same step once more
        operations = 0
        done = False
        while not done:
            left = operations
            with suppress(Killed):
                saved(folder, step + 1 - again, value=step + 1 - again)
                done = True
            left = None
            newest = latest(folder)
            assert newest is not None
            step = load(newest, optimizer)["step"]
            assert holds(optimizer, step), f"killed before operation {operations}"
            operations += 1
        assert operations > 15, "there was nothing to interrupt"


def test_a_save_stopped_before_any_of_its_steps_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_and_die_everywhere, {}, folder=tmp_path)


def save_forever(folder: Path, first: int) -> None:
    """Every step twice, with its number in every element."""
    torch.set_num_threads(1)
    for step in range(first, first + 10000):
        for _ in range(2):
            saved(folder, step, value=step)


def test_a_process_killed_in_mid_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Killed at random moments, so a failure may not come back; it is none the less one."""
    first = 1
    cut_short = 0
    for _ in range(8):
        process = get_context("forkserver").Process(
            target=save_forever, args=(tmp_path, first), daemon=True
        )
        process.start()
        deadline = time.monotonic() + 1200
        while (newest := latest(tmp_path)) is None or int(newest.name[5:]) < first:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        cut_short += any(name.startswith(".") for name in names(tmp_path))
        newest = latest(tmp_path)
        optimizer = small()
        assert newest is not None
        step = load(newest, optimizer)["step"]
        assert step == optimizer.saved_numbers()["steps"] == int(newest.name[5:]) >= first
        assert holds(optimizer, step)
        first = step + 1
    assert cut_short, "no save was interrupted"
