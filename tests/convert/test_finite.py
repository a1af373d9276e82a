"""Numbers that are NaN or infinite are converted as they are, and told by the names of their
tensors."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from megaprec.precision.plan import plan
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.pipeline.kinds import schedule
from tests.other_systems import slow, write_folder
from tests.ranks import run_ranks
from tools.cli import main
from tools.convert.core.finite import not_finite, same_values
from tools.convert.initial import open_initial, start_from


def with_wrong_numbers(folder: Path) -> Path:
    """A folder of bf16 with NaN, infinities of both signs in one tensor, and numbers that FP16 does
    not hold."""
    write_folder(folder, "llama", torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3, 5:8] = torch.nan
    stored["model.layers.2.self_attn.k_proj.weight"][0, :2] = torch.tensor([torch.inf, -torch.inf])
    stored["model.norm.weight"][4] = 1e6
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


WRONG = [
    "warning: weight/layers.1.mlp.up.weight has 3 of 960 numbers that are NaN or infinite",
    "warning: weight/layers.2.attention.key.weight has 2 of 480 numbers that are NaN or infinite",
]


@pytest.mark.parametrize("to", ["megaprec", "hf", "megatron"])
@pytest.mark.usefixtures("torch_files_read_here")
def test_numbers_that_are_not_finite_are_told_by_name(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = with_wrong_numbers(tmp_path / "hf")
    assert main(["convert", str(hf), str(tmp_path / "made"), "--to", to, "--no-verify"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sorted(line for line in said if line.startswith("warning")) == WRONG


def test_numbers_that_a_cast_makes_infinite_are_told_with_both_dtypes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = with_wrong_numbers(tmp_path / "hf")
    assert main(["convert", str(hf), str(tmp_path / "made"), "--dtype", "fp16", "--no-verify"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    cast = ", as float16; it was bfloat16"
    last = f"warning: weight/final_norm.weight has 1 of 24 numbers that are NaN or infinite{cast}"
    assert sorted(said) == [last, *(line + cast for line in WRONG)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_counted_whatever_their_sum(dtype: torch.dtype) -> None:
    """Sums may overflow though no number does, and infinities of both signs may meet."""
    large = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert not_finite(large) == 0 and not_finite(-large) == 0
    large[3], large[7], large[50] = torch.inf, -torch.inf, torch.nan
    assert not_finite(large) == 3 and not_finite(torch.zeros(0, dtype=dtype)) == 0


def started(mesh: DeviceMesh, folder: Path) -> str:
    """What is said as ranks begin a run with the weights of a folder."""
    model = open_initial(folder).model
    engine = Engine.build(
        model,
        plan("bf16"),
        mesh,
        schedule("1f1b", mesh["pp"].size(), 2),
        EngineOptions(micro_batch=2, seq_length=12),
    )
    with redirect_stdout(StringIO()) as said:
        start_from(folder, engine.optimizer)
    return said.getvalue()


@pytest.mark.parametrize("axes", [{"dp": 2}, *slow(({"tp": 2, "pp": 2},))], ids=str)
def test_a_run_that_begins_with_such_numbers_says_so_once(
    axes: dict[str, int], tmp_path: Path
) -> None:
    first, *others = run_ranks(started, axes, folder=with_wrong_numbers(tmp_path / "hf"))
    assert [line.replace(f"{tmp_path}/hf: ", "") for line in first.splitlines()] == WRONG
    assert others == [""] * len(others)


def test_values_are_the_same_if_nan_is_where_the_other_has_it() -> None:
    one = torch.tensor([1.0, torch.nan, 2.0])
    assert same_values(one, one.clone()) and same_values(one[::2], torch.tensor([1.0, 2.0]))
    for other in (
        torch.tensor([1.0, 2.0, 2.0]),
        torch.tensor([torch.nan, 1.0, 2.0]),
        one[:2],
        one.bfloat16(),
    ):
        assert not same_values(one, other) and not same_values(other, one)
    codes = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert same_values(codes, codes.clone()) and not same_values(codes, codes[:1].expand(2))
    damaged = torch.tensor([torch.nan, 2.0]).to(torch.float8_e4m3fn)
    assert same_values(damaged, damaged.clone()) and not same_values(damaged, codes)
