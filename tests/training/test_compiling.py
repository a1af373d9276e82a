"""`train.compile`: every leaf and region of a step is known before it, all ranks compile the same
ones, and a run with compiled code trains what one without does."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from models.attention.packing import Packing
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.leaves import PLAIN, LeafCall, Leaves
from tests.ranks import run_ranks
from tests.runs import steps, train, write_run
from tools.config.run_file import RunConfig, load_run
from tools.parts import optional_parts
from tools.training import compiling
from tools.training.compiling import compile_leaves, leaf_calls, try_calls

SMALL = ["model.vocab=61", "model.layers=3", "model.hidden=16", "model.heads=2", "model.ffn=32"]
SMALL += [
    "train.steps=1",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.seq_length=8",
    "data.vocab_size=61",
]
RUNS = {
    "llama": ["model.kv_heads=1", "model.dropout=0.1"],
    "bf16 with FP32 masters": ["precision.compute=bf16", "model.tied=true"],
    "gpt2": ["model.family=gpt2", "model.dropout=0.1"],
    "gemma3": ["model.family=gemma3", "model.window=4"],
    "experts": ["model.experts=2", "model.experts_per_token=1"],
    "recomputed": ["parallel.recompute=full", "precision.compute=bf16"],
    "documents": ["data.reset_position_ids=true"],
    "llama by block": ["model.kv_heads=1", "model.dropout=0.1", "train.compile=block"],
    "gemma3 by block": ["model.family=gemma3", "model.window=4", "train.compile=block"],
    "recomputed by block": [
        "parallel.recompute=full",
        "precision.compute=bf16",
        "train.compile=block",
    ],
}
FAST = ("llama", "documents", "llama by block")


def loaded(*overrides: str) -> RunConfig:
    return load_run(None, [*SMALL, *overrides])


def noted_in_a_step(config: RunConfig) -> set[LeafCall]:
    """The calls of leaves in a real training step."""
    noted: dict[LeafCall, None] = {}
    train = config.train
    engine = Engine.build(
        config.model,
        config.plan,
        None,
        config.schedule,
        EngineOptions(
            micro_batch=train.micro_batch,
            seq_length=train.seq_length,
            recompute=config.recompute,
            leaves=Leaves(recorded_calls=noted, by_region=train.compile == "block"),
        ),
    )
    ids = torch.randint(
        61, (train.global_batch, train.seq_length + 1), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.arange(train.seq_length).expand(train.global_batch, -1)
    packing = Packing(positions=positions if config.data.reset_position_ids else None)
    engine.step(Share(ids[:, :-1], ids[:, 1:], packing=packing), 1e-3, 0)
    return set(noted)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_the_calls_of_a_step_are_known_before_it_and_do_not_grow_with_its_layers(name: str) -> None:
    config = loaded(*RUNS[name])
    calls = leaf_calls(config, config.model, None, torch.device("cpu"))
    seen = noted_in_a_step(config)
    if name == "experts":  # each expert gets as many tokens as the router sends it
        seen = {call for call in seen if "glu" not in call.name}
    assert seen and seen <= set(calls)
    deeper = loaded(*RUNS[name], "model.layers=6")
    assert len(leaf_calls(deeper, deeper.model, None, torch.device("cpu"))) <= len(calls) + 2


LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "tensor": ({"tp": 2}, ["parallel.tensor=2", "model.dropout=0.1", "parallel.sequence=true"]),
    "context": ({"cp": 2}, ["parallel.context=2"]),
    "tensor and pipeline by block": (
        {"pp": 2, "tp": 2},
        ["parallel.tensor=2", "parallel.pipeline=2", "train.compile=block"],
    ),
}


def unforeseen_calls(mesh: DeviceMesh, overrides: list[str]) -> set[str]:
    """The leaves that this rank calls in a step in forms that it did not foresee."""
    config = loaded(*overrides)
    noted: dict[LeafCall, None] = {}
    by_region = config.train.compile == "block"
    options = replace(
        config.engine_options, leaves=Leaves(recorded_calls=noted, by_region=by_region)
    )
    engine = Engine.build(config.model, config.plan, mesh, config.schedule, options)
    train = config.train
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (train.global_batch, train.seq_length + 1), generator=dice)
    engine.step(Share(ids[:, :-1], ids[:, 1:]), 1e-3, 0)
    calls = leaf_calls(config, config.model, mesh, torch.device("cpu"))
    assert noted
    return {call.name for call in set(noted) - set(calls)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_layout_foresees_the_calls_of_its_step(name: str) -> None:
    """Each has its own part of the vocabulary, of the heads and of the sequence."""
    axes, overrides = LAYOUTS[name]
    unforeseen = run_ranks(unforeseen_calls, axes, overrides=overrides)
    assert not any(unforeseen), unforeseen


def tried_with(broken: str) -> Callable[..., Any]:
    """`try_calls`, where all leaves "compile" but the broken one."""

    def form(call: LeafCall) -> Any:
        if call.name == broken:
            raise RuntimeError(
                "C++ compile error\n\nOutput:\nx.cpp:3:1: error: no such thing\n^ here"
            )
        return lambda *tensors: call.run(tensors)

    compiling.compiled = form
    return try_calls


def names_on_rank(mesh: DeviceMesh, broken_on: int) -> tuple[str, set[str]]:
    compiling.try_calls = tried_with("rotary" if mesh.get_rank() == broken_on else "")
    config = loaded("train.compile=leaves", "parallel.data=2")
    leaves = compile_leaves(config, config.model, mesh)
    return leaves.names, {call.name for call in leaves.compiled}


@pytest.mark.slow
def test_a_leaf_that_one_rank_cannot_compile_is_compiled_on_none() -> None:
    for broken_on in (0, 1, 2):
        one, other = run_ranks(names_on_rank, {"dp": 2}, broken_on=broken_on)
        assert one == other
        assert ("rotary" in one[1]) == (broken_on == 2)
        assert {"norm", "norm gradients", "swiglu", "loss sums"} <= one[1]


def test_the_lines_name_what_is_compiled_and_why_others_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "compiled", compiling.compiled)
    config = loaded("train.compile=leaves")
    assert compile_leaves(loaded(), config.model, None) is PLAIN and not capsys.readouterr().out
    tried_with("rotary")
    leaves = compile_leaves(config, config.model, None)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "compiling  10 forms: some seconds each at first, less in later runs"
    names = (
        "loss gradient, loss sums, losses, norm, norm gradients, scaled loss sums, swiglu, swiglu "
        "gradient"
    )
    assert lines[0].startswith(f"compiled   {names}: ")
    reason = "RuntimeError: x.cpp:3:1: error: no such thing"
    assert lines[1:] == [
        f"note       not compiled on any rank: rotary; the reason on rank 0: {reason}"
    ]
    assert leaves.names == names


def test_a_machine_without_a_compiler_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(call: LeafCall) -> Any:
        raise RuntimeError("No working C++ compiler found in gcc, g++")

    monkeypatch.setattr(compiling, "compiled", missing)
    config = loaded("train.compile=leaves")
    assert not compile_leaves(config, config.model, None).compiled
    _, line = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "; the reason on rank 0: RuntimeError: No working C++ compiler found in gcc, g++"
    )


def test_a_form_that_computes_other_numbers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded()
    calls = leaf_calls(config, config.model, None, torch.device("cpu"))
    monkeypatch.setattr(compiling, "compiled", lambda call: lambda *tensors: tensors[0] + 1)
    _, failed = try_calls(calls)
    assert set(failed) == {call.name for call in calls}
    assert "its compiled form computes other numbers" in failed.values()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.numerics=canonical", "train.threads=1"], "canonical"),
        (["model.factory=mine.py:build"], "model.factory"),
        (["train.compile=whole"], "train.compile"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=r"train\.compile") as refused:
        loaded("train.compile=leaves", *overrides)
    assert key in str(refused.value)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which((os.environ.get("CC") or "cc").split()[0]), reason="needs a C compiler"
)
def test_a_run_with_compiled_code_trains_the_same_in_float64_and_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # most leaves of a block are compiled already
    monkeypatch.setattr(compiling, "compiled", cache(compiling.compiled))
    file = write_run(tmp_path)
    exact = ["precision.compute=fp64", "train.steps=3"]
    records = {}
    for how in ("off", "leaves", "block"):
        folder = f"train.folder={tmp_path / how}"
        assert train(file, *exact, folder, f"train.compile={how}") == 0
        said = capsys.readouterr().out
        assert "not compiled" not in said and ("add norm" in said and "heads" in said) == (
            how == "block"
        )
        records[how] = steps(tmp_path / how)
    for key in ("loss", "grad_norm"):
        off, *others = ([step[key] for step in records[how]] for how in records)
        for values in others:
            torch.testing.assert_close(values, off, rtol=1e-11, atol=0)
    again = [*exact, f"train.folder={tmp_path / 'leaves'}"]
    assert train(file, *again, "train.steps=4") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert 'train.compile: "leaves" -> "auto"' in output
    assert "-> none (not bit for bit)" in output


@pytest.mark.slow
def test_a_resume_with_other_compiled_leaves_is_not_called_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compiled", compiling.compiled)
    file = write_run(tmp_path)
    leaves = "train.compile=leaves"
    tried_with("")
    assert train(file, leaves, "train.steps=1") == 0
    tried_with("rotary")
    capsys.readouterr()
    assert train(file, leaves, "train.steps=2") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "compiled code:" in line)
    assert line.startswith(
        "changed    compiled code: dropout, dropout gradient, loss gradient, loss sums, losses,"
    )
    assert line.endswith("(not bit for bit)")


def test_what_ran_uncompiled_is_told_after_the_first_step_of_each_run_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_leaf(*given: object) -> Leaves:
        """A name of a compiled leaf, which no call has the form of."""
        return Leaves(names="swiglu", misses=Counter(swiglu=3))

    def told(leaves: Leaves, *given: object) -> list[str]:
        assert leaves.misses["swiglu"] == 0, "of other passes than steps"
        return ["it ran uncompiled"]

    monkeypatch.setattr(optional_parts, "compile_leaves", one_leaf)
    monkeypatch.setattr(optional_parts, "missed_lines", told)
    file = write_run(tmp_path)
    assert train(file, "train.compile=leaves", "train.steps=2") == 0
    assert train(file, "train.compile=leaves", "train.steps=4") == 0
    said = capsys.readouterr().out.splitlines()
    places = [number for number, line in enumerate(said) if "it ran uncompiled" in line]
    first_steps = [number for number, line in enumerate(said) if re.match(r" *step +[13]\b", line)]
    assert len(places) == 2
    assert places == [number - 1 for number in first_steps], said
