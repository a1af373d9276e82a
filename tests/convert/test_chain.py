"""Weights on the whole way round: Hugging Face, ranks that train, Megatron over other ranks,
Hugging Face again.

tp 2 x pp 2 ranks begin with a folder's weights, take a step with learning rate zero, so that the
moments are those of a real step and the weights are what they were, and save. What is exported from
that through Megatron's files of four tensor-parallel ranks has to be the first folder, bit for bit.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import save
from megaprec.precision.plan import plan
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.pipeline.kinds import schedule
from tests.other_systems import (
    CONFIGS,
    FOR_MEGATRON,
    OTHERS_FROM_MEGATRON,
    WITHOUT_MEGATRON,
    write_folder,
)
from tests.ranks import run_ranks
from tests.runs import tensors
from tools.cli import main
from tools.convert.initial import open_initial, start_from

pytestmark = pytest.mark.usefixtures("torch_files_read_here")
TOKENS = torch.randint(131, (4, 12), generator=torch.Generator().manual_seed(2))
# What Megatron has no word for is left out of these.
CHANGED: dict[str, dict[str, Any]] = {
    "gpt_neox-sequential": {
        "kind": "gpt_neox",
        "use_parallel_residual": False,
        "hidden_act": "gelu_new",
    },
    "mistral-all-seen": {"kind": "mistral", "sliding_window": None},
    "deepseek_v3-limited": {"kind": "deepseek_v3", **FOR_MEGATRON["deepseek_v3"]},
    "glm4_moe-limited": {"kind": "glm4_moe", **FOR_MEGATRON["glm4_moe"]},
    "llama-even": {"kind": "llama", "vocab_size": 256, "num_key_value_heads": 4},
}
KINDS = [*CONFIGS, *CHANGED]
IN_MEGATRON = [kind for kind in KINDS if kind not in WITHOUT_MEGATRON | OTHERS_FROM_MEGATRON.keys()]


def folder_of(kind: str, folder: Path) -> Path:
    changes = dict(CHANGED.get(kind, {"kind": kind}))
    return write_folder(folder, changes.pop("kind"), torch.bfloat16, **changes)


def train_from(mesh: DeviceMesh, folders: Sequence[Path]) -> None:
    """Begins with each folder's weights, takes a step that moves nothing, saves beside the
    folder."""
    for folder in folders:
        model = open_initial(folder).model.model_copy(update={"router_correction_speed": 0.0})
        engine = Engine.build(
            model,
            plan("bf16"),
            mesh,
            schedule("1f1b", 2, 2),
            EngineOptions(micro_batch=2, seq_length=12, sequence=True),
        )
        start_from(folder, engine.optimizer)
        report = engine.step(Share(TOKENS, TOKENS.roll(-1, 1)), lr=0.0, number=0)
        assert report.outcome == "applied"
        progress = {"step": 1, "applied": 1, "samples": 4, "applied_samples": 4, "tokens": 48}
        save(
            folder.parent / "run/checkpoints",
            1,
            engine.optimizer,
            {"model": json.loads(model.model_dump_json()), "progress": progress},
        )


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KIND/hf, a folder, and KIND/run, the run directory of the ranks that began with it; of kinds
    that are tried."""
    place = tmp_path_factory.mktemp("chain")
    cases = (
        case
        for case in request.session.items
        if case.path == request.path and isinstance(case, pytest.Function)
    )
    kinds = dict.fromkeys(str(case.callspec.params["kind"]) for case in cases)
    folders = [folder_of(kind, place / kind / "hf") for kind in kinds]
    run_ranks(train_from, {"tp": 2, "pp": 2}, folders=folders)
    return place


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def same_weights(one: Path, other: Path) -> None:
    """Compare two folders; a router's correction is FP32 in what is converted, whatever it was
    before."""
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    before |= {
        name: value.float()
        for name, value in before.items()
        if name.endswith("e_score_correction_bias")
    }
    assert before.keys() == after.keys()
    assert not [
        n
        for n in before
        if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])
    ]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_ranks_began_with_and_saved_are_exported_bit_for_bit(
    kind: str, trained: Path, tmp_path: Path
) -> None:
    convert(trained / kind / "run", tmp_path / "hf", "--dtype", "bf16")
    same_weights(trained / kind / "hf", tmp_path / "hf")


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", IN_MEGATRON)
def test_weights_that_ranks_saved_go_through_megatrons_files_bit_for_bit(
    kind: str, trained: Path, tmp_path: Path
) -> None:
    megatron = tmp_path / "megatron"
    convert(trained / kind / "run", megatron, "--to", "megatron", "--tp", 4, "--dtype", "bf16")
    assert len(list(megatron.glob("iter_0000001/mp_rank_0?/model_optim_rng.pt"))) == 4
    convert(megatron, tmp_path / "hf", "--to", "hf", "--dtype", "bf16")
    same_weights(trained / kind / "hf", tmp_path / "hf")
    convert(megatron, tmp_path / "ours")
    before = tensors(trained / kind / "run/checkpoints/step_00000001")
    after = tensors(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    still = {
        name
        for name in after
        if name.startswith("exp_avg/") and "key.bias" not in name and not after[name].any()
    }
    assert all(".experts." in name for name in still), (
        "only an expert without a token has moments of zero"
    )
    for name in still:
        layer = name.partition(".experts.")[0]
        assert any(name.startswith(layer) and ".experts." in name for name in after.keys() - still)
