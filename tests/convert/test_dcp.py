"""PyTorch's distributed checkpoints of models of transformers that FSDP sharded over gloo ranks:
the same logits in float64, or one line."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.convert.test_megatron_bare import RUN
from tests.convert.test_transformers import theirs
from tests.models.test_families import float32_is_float64
from tests.other_systems import CONFIGS, usually, write_folder
from tests.ranks import run_ranks
from tests.refusals import raises, shows
from tests.runs import steps, train, write_run
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

PRELOADED = ["transformers"]
pytestmark = [
    pytest.mark.usefixtures("torch_files_read_here"),
    pytest.mark.filterwarnings("ignore"),  # those of torch and transformers
]
IDS = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(1))
AROUND: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "bare": lambda model, optimizer: model,
    "model.": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "app.model.": lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
}


def save_sharded(mesh: DeviceMesh, hf: str, folder: str, around: str, dtype: torch.dtype) -> None:
    """Save a model that lies in `hf` from the ranks that FSDP2 shards it over, with the state of a
    step that changed nothing."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=dtype)
    ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = AROUND[around](*get_state_dict(model, optimizer))
    dcp.save(state, checkpoint_id=folder)


def logits_of(folder: Path) -> Tensor:
    return load_stage(open_source(folder), "fp64")(IDS.t()).transpose(0, 1)


# Those whose layers are not `layers` would need another way to shard them.
KINDS = [kind for kind in CONFIGS if kind not in ("gpt2", "gpt2-untied")]


@pytest.mark.cases(1, sample=2)
@pytest.mark.parametrize(
    "kind", usually(("llama",), [k for k in KINDS if not k.startswith("gpt2")])
)
def test_what_fsdp_sharded_over_four_ranks_has_the_logits_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    with float32_is_float64():
        expected = theirs(tmp_path / "hf", kind, torch.float64)(IDS).logits
    folder = tmp_path / "dcp"
    run_ranks(
        save_sharded,
        {"dp": 4},
        hf=str(tmp_path / "hf"),
        folder=str(folder),
        around="app.model.",
        dtype=torch.float64,
    )
    assert len(list(folder.glob("__*_*.distcp"))) == 4
    shutil.copy(tmp_path / "hf/config.json", folder)
    source = open_source(folder)
    assert source.kind == "dcp" and source.facts.unread == "the optimizer's state"
    torch.testing.assert_close(logits_of(folder), expected, rtol=0, atol=1e-10)
