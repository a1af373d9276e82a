"""NeMo 2's checkpoints by Megatron-core's own code: its modules, its saving, and all fields of its
configuration."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from models.config import ModelConfig
from tests.convert.test_megatron import build, core, ids_of, save_in_chunks
from tests.nemo import config_of, write_context
from tests.other_systems import CONFIGS, MEGATRON, NEEDS_MEGATRON, slow
from tests.ranks import run_ranks
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.keys import ALIASES, FREE, FREE_PREFIXES
from tools.convert.systems.nemo import ONLY, REQUIRED, model_of
from tools.convert.verify import load_stage

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of megatron-core
    pytest.mark.usefixtures("torch_files_read_here"),
    NEEDS_MEGATRON,
]
PRELOADED = MEGATRON


def fields_of(config: Any, model: ModelConfig) -> dict[str, Any]:
    """What NeMo dumps: the model's own keys, and every field of Megatron-core's class with its
    default."""
    dumped = {}
    for field in dataclasses.fields(config):
        default = field.default if field.default is not dataclasses.MISSING else None
        plain = default is None or isinstance(default, str | int | float | bool)
        if plain:
            dumped[field.name] = default
        else:
            dumped[field.name] = {"_target_": f"somewhere.{field.name}", "_call_": False}
    return dumped | config_of(model)


def save(mesh: DeviceMesh, kind: str, folder: Path, tp: int, pp: int) -> Tensor | None:
    """Saves as nemo/lightning/io/pl.py does, returns the logits if this rank has all layers."""
    model = build(kind, tp, pp)
    torch.manual_seed(3 + dist.get_rank())
    save_in_chunks(model.sharded_state_dict(prefix="module."), folder / "weights")
    if dist.get_rank() == 0:
        write_context(folder, fields_of(model.config, from_hugging_face(CONFIGS[kind])))
    if pp > 1:
        return None
    ids = ids_of()
    s = ids_of().shape[1]
    positions = torch.arange(s)[None].expand(len(ids), -1)
    future = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model.eval()(ids, positions, future)[..., :131]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", ["llama", *slow(("gpt2",), ("qwen3",), ("llama-tied",))])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), *slow((1, 1), (1, 2), (2, 2), (4, 1))])
def test_what_megatron_core_saves_for_nemo_computes_the_same(
    kind: str, tp: int, pp: int, tmp_path: Path
) -> None:
    answers = run_ranks(save, {"tp": tp, "pp": pp}, kind=kind, folder=tmp_path, tp=tp, pp=pp)
    ours = load_stage(open_source(tmp_path, 131))(ids_of().t()).transpose(0, 1)
    for logits in answers if pp == 1 else ():
        torch.testing.assert_close(
            logits, ours, rtol=0, atol=1e-5 * max(1.0, ours.abs().max().item())
        )


@pytest.mark.slow
def test_every_field_of_megatron_cores_configuration_is_accounted_for() -> None:
    model = from_hugging_face(CONFIGS["llama"])
    config = core("transformer.transformer_config").TransformerConfig
    assert model_of(fields_of(config, model), 131, "model.yaml") == model


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {"_target_": "elsewhere.other", "_call_": False}
    if value:
        return "other"
    return 3


def free(name: str) -> bool:
    return name in FREE or name.startswith(FREE_PREFIXES)


def taken(said: dict[str, Any], name: str) -> ModelConfig | None:
    """The model, if it is not refused by the name of the field."""
    try:
        return model_of(said | {name: other_than(said[name])}, 131, "model.yaml")
    except UserError as error:
        if name in REQUIRED or name in " ".join(error.problems):
            return None
        return model_of(said, 131, "model.yaml")


@pytest.mark.slow
def test_no_field_that_would_make_it_another_model_passes_unread() -> None:
    """A field that nothing is read of has its reason among Megatron's, which logits prove, or is of
    what is absent."""
    model = from_hugging_face(CONFIGS["llama"])
    config = core("transformer.transformer_config").TransformerConfig
    said = fields_of(config, model)
    names = [field.name for field in dataclasses.fields(config)]
    passed = [name for name in names if name not in REQUIRED and taken(said, name) == model]
    absent = ("moe_", "mtp_", "mamba_", "linear_")
    unread = [name for name in passed if not name.startswith(absent)]
    assert "num_moe_experts" in ONLY and len(passed) > 100
    assert [name for name in unread if not free(ALIASES.get(name, name))] == []
