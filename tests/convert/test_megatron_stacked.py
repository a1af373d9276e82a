"""Distributed checkpoints as the format is stated, written by torch alone: every way to stack; what
is refused."""

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.other_systems import write_folder
from tests.refusals import sentence, shows
from tests.runs import tensors
from tools.cli import main
from tools.convert.core.names import megatron
from tools.convert.core.rules import head_sizes, matches
from tools.convert.core.source import Source
from tools.convert.formats import open_source
from tools.convert.megatron.args import args_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, about saving without ranks
    pytest.mark.usefixtures("torch_files_read_here"),
]
PADDED = 256
Stacking = tuple[bool, bool, bool]  # layers stacked, experts stacked, gate and up apart
STACKINGS: dict[str, Stacking] = {
    "layers and experts": (True, True, False),
    "layers": (True, False, False),
    "experts": (False, True, False),
    "nothing": (False, False, False),
    "nothing, gate and up apart": (False, False, True),
}
ONES = torch.ones(2, 64)
CHAINED = "chained_1.optimizer.state."


def state_of(source: Source, stacking: Stacking) -> dict[str, Tensor]:
    """The model's tensors under the names of a distributed checkpoint."""
    layers, experts, apart = stacking
    found: dict[str, Any] = {}
    for match in matches(megatron(True, False, source.model), source.model):
        parts = [source.read(f"weight/{name}") for name in match.logical]
        values, (place, name) = (
            match.how.join(parts, head_sizes(source.model)),
            placed(match.foreign, layers, experts),
        )
        if match.cut == "vocabulary":
            values = torch.cat([values, torch.full((PADDED - len(values), values.shape[1]), 7.0)])
        if apart and "linear_fc1.weight" in name:
            found |= {f"{name}_w": values.chunk(2)[0], f"{name}_v": values.chunk(2)[1]}
        elif place:
            found.setdefault(name, {})[place] = values
        else:
            found[name] = values
    return {name: v if isinstance(v, Tensor) else piled(v) for name, v in found.items()}


def placed(name: str, layers: bool, experts: bool) -> tuple[tuple[int, ...], str]:
    """(numbers along the dims that stack, the name without them)."""
    place = []
    kept = []
    for before, part in zip(["", *name.split(".")], name.split("."), strict=False):
        if part.isdigit() and (layers if before == "layers" else experts):
            place.append(int(part))
        else:
            kept.append("experts" if part == "local_experts" else part)
    return tuple(place), ".".join(kept)


def piled(values: dict[tuple[int, ...], Tensor]) -> Tensor:
    sizes = [1 + max(place[dim] for place in values) for dim in range(len(next(iter(values))))]
    return torch.stack([values[place] for place in sorted(values)]).unflatten(0, sizes)


def write(folder: Path, source: Source, state: dict[str, Tensor]) -> Path:
    folder.mkdir()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    args = argparse.Namespace(**args_of(source.model, PADDED, 2, 1, True, torch.float32))
    groups = {"optimizer": {"param_groups": [{"step": 7}]}}
    torch.save(
        {"args": args, "iteration": 9, "optimizer": {0: groups, 1: groups}}, folder / "common.pt"
    )
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return open_source(write_folder(tmp_path / "hf", "mixtral"))


@pytest.mark.parametrize("stacking", STACKINGS.values(), ids=STACKINGS)
def test_however_layers_and_experts_are_stacked_the_model_is_the_same(
    stacking: Stacking, source: Source, tmp_path: Path
) -> None:
    folder = write(tmp_path / "dist", source, state_of(source, stacking))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    ours = tensors(tmp_path / "ours")
    assert ours.keys() == set(source.keys("weight"))
    assert all(torch.equal(values, source.read(key)) for key, values in ours.items())


def test_masters_moments_and_steps_stand_beside_the_weights(source: Source, tmp_path: Path) -> None:
    state = state_of(source, STACKINGS["layers and experts"])
    kept = {name: values.bfloat16() for name, values in state.items()}
    kept |= {f"{CHAINED}fp32_param.{name}": values for name, values in state.items()}
    kept |= {f"{CHAINED}exp_avg.{name}": values * 2 for name, values in state.items()}
    kept |= {f"{CHAINED}exp_avg_sq.{name}": values * 3 for name, values in state.items()}
    read = open_source(write(tmp_path / "dist", source, kept))
    assert read.facts.steps == 7
    for number, kind in enumerate(("weight", "exp_avg", "exp_avg_sq")):
        for key in source.keys("weight"):
            assert torch.equal(
                read.read(key.replace("weight/", f"{kind}/", 1)), source.read(key) * (number + 1)
            )


@pytest.mark.parametrize("form", ["fully_sharded_bucket_space", "dp_zero_gather_scatter", None])
def test_state_in_buffers_of_another_form_is_left_aside_and_said_to_be(
    form: str | None, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, "
        "torch.float32).bucket_idx_0.exp_avg"
    )
    state = state_of(source, STACKINGS["experts"])
    folder = write(
        tmp_path / "dist",
        source,
        state if form == "dp_zero_gather_scatter" else {**state, flat: ONES},
    )
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save(
        {**common, "optimizer": {0: {"param_state_sharding_type": form}}}, folder / "common.pt"
    )
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    assert (
        f"not read: the optimizer's state, in flat buffers of {form or 'an unnamed form'}"
        in capsys.readouterr().out
    )
    assert {key.split("/")[0] for key in tensors(tmp_path / "ours")} == {"weight"}


@contextmanager
def sizes_read() -> Iterator[list[int]]:
    """Bytes of each tensor that is made to be read into."""
    sizes: list[int] = []
    plain = torch.empty

    def noted(*size: Any, **options: Any) -> Tensor:
        made = plain(*size, **options)
        sizes.append(made.numel() * made.itemsize)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.convert.core.tensors.torch.empty", noted)
        yield sizes


def test_of_stacked_experts_only_the_one_asked_for_is_read(source: Source, tmp_path: Path) -> None:
    """One file of a stack, of which the bytes of all other experts are gone."""
    folder = write(tmp_path / "dist", source, state_of(source, STACKINGS["layers and experts"]))
    read = open_source(folder)
    with sizes_read() as sizes:
        read.read("weight/layers.1.mlp.experts.2.gate.weight")
    assert max(sizes) == 4 * 2 * 40 * 24


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: values for key, values in state.items() if key != name}


FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (
        without(FC1),
        sentence(
            "convert.tensor_missing",
            name="decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        ),
    ),
    "surplus": (
        lambda s: s | {"decoder.layers.mlp.shared.weight": torch.ones(4)},
        sentence("convert.megatron_tensor_extra"),
    ),
    "other experts": (
        lambda s: s | {FC1: s[FC1][:, :2]},
        sentence("convert.megatron_layer_count", counts="[4, 3]"),
    ),
    "other layers": (
        lambda s: s | {FC1: torch.cat([s[FC1], s[FC1]])},
        sentence("convert.megatron_layer_count", counts="[4, 3]"),
    ),
    "other shape": (
        lambda s: s | {FC1: s[FC1][..., :7]},
        sentence("convert.tensor_shape", expected_shape="[80, 24]"),
    ),
    "twice": (
        lambda s: s | {f"{CHAINED}exp_avg.{FC1}": s[FC1], f"optimizer.state.exp_avg.{FC1}": s[FC1]},
        sentence("convert.megatron_optimizer_twice", kind="exp_avg", name=FC1),
    ),
    "another master": (
        lambda s: s | {f"{CHAINED}fp32_param.{name}": v + 1 for name, v in s.items()},
        sentence("convert.megatron_master_differs"),
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_the_model_is_refused(
    fault: str, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = REFUSED[fault]
    folder = write(
        tmp_path / "dist", source, change(state_of(source, STACKINGS["layers and experts"]))
    )
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "ours").exists()


def test_files_by_rank_of_experts_that_are_cut_over_more_ranks_are_refused(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron names files by tensor-parallel rank, so ranks with other parts of experts overwrite
    each other's."""
    assert (
        main(
            [
                "convert",
                str(source.path),
                str(tmp_path / "megatron"),
                "--to",
                "megatron",
                "--tp",
                "2",
            ]
        )
        == 0
    )
    file = next((tmp_path / "megatron").rglob("mp_rank_00/model_optim_rng.pt"))
    content = torch.load(file, weights_only=False)
    content["args"].expert_tensor_parallel_size = 4
    torch.save(content, file)
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.megatron_expert_tensor_ranks", expert_tp=4, tp=2)
