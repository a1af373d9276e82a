"""Torch files of unknown origin: what they hold is found without reading it, and nothing in them
runs."""

import argparse
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaprec.errors import UserError
from tests.other_systems import slow, write_folder
from tests.refusals import raises
from tools.cli import main
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import PROGRAM, contents, tensors_in


class Malice:
    """Unpickling this runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return subprocess.getoutput, (f"touch {self.witness}",)


def test_the_bait_works_where_pickles_are_trusted(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malice(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def put_weights(folder: Path, witness: Path) -> Path:
    hf = write_folder(folder / "hf", "llama")
    (hf / "model.safetensors").unlink()
    torch.save(
        {"model.norm.weight": torch.zeros(24), "x": Malice(witness)}, hf / "pytorch_model.bin"
    )
    return hf


def put_legacy(folder: Path, witness: Path) -> Path:
    rank = folder / "iter_0000001/mp_rank_00"
    rank.mkdir(parents=True)
    torch.save(
        {"args": argparse.Namespace(x=Malice(witness)), "model": {}}, rank / "model_optim_rng.pt"
    )
    return folder / "iter_0000001"


def put_plain_pickle(folder: Path, witness: Path) -> Path:
    found = put_legacy(folder, witness)
    (found / "mp_rank_00/model_optim_rng.pt").write_bytes(pickle.dumps(Malice(witness)))
    return found


def put_optimizer(folder: Path, witness: Path) -> Path:
    """Beside a sound file of a rank."""
    hf = write_folder(folder / "hf", "llama")
    assert main(["convert", str(hf), str(folder / "megatron"), "--to", "megatron"]) == 0
    rank = folder / "megatron/iter_0000000/mp_rank_00"
    content = torch.load(rank / "model_optim_rng.pt", weights_only=False)
    torch.save({**content, "optimizer": {"param_groups": []}}, rank / "model_optim_rng.pt")
    torch.save([{0: Malice(witness)}], rank / "distrib_optim.pt")
    return folder / "megatron"


def put_metadata(folder: Path, witness: Path) -> Path:
    (folder / "dist").mkdir()
    torch.save({"args": argparse.Namespace(**MEGATRON)}, folder / "dist/common.pt")
    (folder / "dist/.metadata").write_bytes(pickle.dumps(Malice(witness)))
    return folder / "dist"


MEGATRON = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "padded_vocab_size": 128,
    "max_position_embeddings": 8,
}


KINDS = [put_weights, put_legacy, put_plain_pickle, put_optimizer, put_metadata]
INSPECTED = [(kind, "inspect") for kind in KINDS]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("put", "command"),
    [*((kind, "convert") for kind in KINDS), INSPECTED[0], *slow(*INSPECTED[1:])],
)
def test_a_malicious_pickle_does_not_run(
    put: Any, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, tmp_path / "ran")
    assert (
        main([command, str(path), *([str(tmp_path / "out")] if command == "convert" else [])]) == 2
    )
    said = capsys.readouterr().err
    assert "is not opened: " in said and "Traceback" not in said
    assert "getoutput" in said or put is put_plain_pickle
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_values_lie_where_it_says(tmp_path: Path) -> None:
    base = torch.randn(7, 5, dtype=torch.float64)
    held = {
        "args": argparse.Namespace(hidden_size=3, names=["a"], dtype=torch.bfloat16),
        "model": OrderedDict(
            a=base, b=base[2:4], c=base.t(), d=torch.nn.Parameter(torch.ones(2)), e=None
        ),
        "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": 4}},
        "random": np.random.RandomState(0).get_state(),
    }
    torch.save(held, tmp_path / "file.pt")
    (found,) = contents([tmp_path / "file.pt"])
    assert found["args"] == {"hidden_size": 3, "names": ["a"], "dtype": "torch.bfloat16"}
    for name, expected in held["model"].items():
        read = found["model"][name]
        assert torch.equal(read.read(), expected) if expected is not None else read is None
    assert found["state"][0]["step"].read().item() == 3
    assert found["state"][1] == {"step": 4}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "cut", ["in the middle", *slow(("at once",), ("in the magic",), ("in the directory",))]
)
def test_a_truncated_file_is_refused(cut: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    end = {
        "at once": 0,
        "in the magic": 10,
        "in the middle": len(content) // 2,
        "in the directory": len(content) - 30,
    }
    (tmp_path / "file.pt").write_bytes(content[: end[cut]])
    with pytest.raises(UserError, match="is not opened"):
        tensors_in(tmp_path / "file.pt")


def test_a_tensor_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with raises("convert.truncated"):
        Stored(tmp_path / "file", torch.float32, (10, 10), 40).read()


@pytest.mark.slow
def test_the_process_that_looks_into_files_can_neither_write_nor_take_much_memory(
    tmp_path: Path,
) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import torch, untrusted; "
        "untrusted.limit()\n"
        "try: bytearray(6 << 30); print('memory')\n"
        "except MemoryError: pass\n"
        f"try: open({str(tmp_path / 'x')!r}, 'wb', 0).write(b'a'); print('file')\n"
        "except OSError: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert not (tmp_path / "x").exists() or (tmp_path / "x").stat().st_size == 0
