"""PyTorch's distributed checkpoints of models of transformers that FSDP sharded over gloo ranks:
the same logits in float64, or one line."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaprec.errors import UserError
from tests.convert.test_megatron_bare import RUN
from tests.convert.test_transformers import theirs, write_job
from tests.families import CASES, THEIRS
from tests.models.test_families import float32_is_float64
from tests.other_systems import CONFIGS, write_folder
from tests.ranks import run_ranks
from tests.refusals import raises, shows
from tests.runs import steps
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.convert.core.rules import matches
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.initial import open_initial
from tools.convert.systems.torchtitan import VersionSpelling, titan_rules
from tools.convert.verify import load_stage

transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)
PRELOADED = ["transformers"]
pytestmark = [
    pytest.mark.usefixtures("torch_files_read_here"),
    pytest.mark.filterwarnings("ignore"),  # those of torch and transformers
]
OWN_MODEL, _, _ = RUN.partition("[data]")
IDS = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(1))


def save_sharded(mesh: DeviceMesh, hf: str, folder: str) -> None:
    """Save a model that lies in `hf` from the ranks that FSDP2 shards it over, with the state of a
    step that changed nothing."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64)
    ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": moments}}, checkpoint_id=folder)


def logits_of(folder: Path) -> Tensor:
    return load_stage(open_source(folder), "fp64")(IDS.t()).transpose(0, 1)


# GPT-2's layers have another name by which they would be sharded.
KINDS = [kind for kind in CONFIGS if not kind.startswith("gpt2")]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_fsdp_sharded_over_four_ranks_has_the_logits_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    with float32_is_float64():
        expected = theirs(tmp_path / "hf", kind, torch.float64)(IDS).logits
    folder = tmp_path / "dcp"
    run_ranks(save_sharded, {"dp": 4}, hf=str(tmp_path / "hf"), folder=str(folder))
    assert len(list(folder.glob("__*_*.distcp"))) == 4
    shutil.copy(tmp_path / "hf/config.json", folder)
    source = open_source(folder)
    assert source.kind == "dcp" and source.facts.unread == "the optimizer's state"
    torch.testing.assert_close(logits_of(folder), expected, rtol=0, atol=1e-10)


def write_dcp(folder: Path, kind: str, around: str = "", wrapper: str = "") -> Path:
    """A checkpoint of one process, by the names of a folder of Hugging Face's that is beside it.

    around: before every name. wrapper: a module within.
    """
    there = write_folder(folder / "hf", kind)
    weights = load_file(there / "model.safetensors")
    state = {}
    for name, values in weights.items():
        state[around + name.replace("layers.", f"layers.{wrapper}", 1)] = values
    state["optimizer.state.0.exp_avg"] = torch.ones(3)
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize(
    ("around", "wrapper"),
    [
        ("", ""),
        ("model.", ""),
        ("app.model.", "_fsdp_wrapped_module."),
        ("_orig_mod.", "_checkpoint_wrapped_module."),
    ],
)
def test_what_is_before_and_within_names_changes_nothing(
    around: str, wrapper: str, tmp_path: Path
) -> None:
    folder = write_dcp(tmp_path, "llama", around, wrapper)
    shutil.copy(tmp_path / "hf/config.json", folder)
    ours = open_source(folder)
    theirs = open_source(tmp_path / "hf")
    assert ours.shapes == theirs.shapes
    for key in ours.shapes:
        assert torch.equal(ours.read(key), theirs.read(key)), key
    assert ours.facts.unread == "the optimizer's state"


def write_hybrid(folder: Path) -> Path:
    """A folder that transformers writes of a Nemotron-H."""
    case = CASES["nemotron_h"]
    config = transformers.AutoConfig.for_model(case.kind, **(THEIRS | case.theirs))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_a_hybrid_is_found_by_both_names_of_its_embedding(prefix: str, tmp_path: Path) -> None:
    """Published files have one, and what transformers 5 trains the other."""
    source = open_source(write_hybrid(tmp_path / "hf"))
    state = {}
    for name, values in load_file(tmp_path / "hf/model.safetensors").items():
        name = name.removeprefix("backbone.").removeprefix("model.")
        state[name if name.startswith("lm_head") else prefix + name] = values
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "dcp")
    ours = open_source(tmp_path / "dcp")
    for key in source.shapes:
        assert torch.equal(ours.read(key), source.read(key)), key


def test_a_run_file_says_what_the_model_is_unless_a_config_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dcp(tmp_path, "llama")
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out)]) == 2
    assert shows(
        capsys.readouterr().err, "convert.dcp_config_missing", path=f"{folder}/config.json"
    )
    given = ["--config", str(run), "--verify", "logits"]
    assert main(["convert", str(folder), str(out), *given]) == 0
    told = capsys.readouterr().out
    assert "what the model is was taken from the run file" in told
    assert "not read: the optimizer's state" in told
    theirs = open_source(tmp_path / "hf")
    ours = open_source(out)
    for key in theirs.shapes:
        assert torch.equal(ours.read(key), theirs.read(key)), key
    shutil.copy(tmp_path / "hf/config.json", tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "again"), "--config", str(run)]) == 2
    assert shows(capsys.readouterr().err, "convert.config_unused", path=f"{tmp_path}/config.json")


def names_of(tensors: dict[str, Tensor], folder: Path) -> Path:
    """A checkpoint of a llama with these tensors beside its own, or in their place."""
    there = write_folder(folder / "hf", "llama")
    state = {**load_file(there / "model.safetensors"), **tensors}
    kept = {name: values for name, values in state.items() if len(values)}
    dcp.save(kept, checkpoint_id=folder / "dcp", no_dist=True)
    shutil.copy(there / "config.json", folder / "dcp")
    return folder / "dcp"


GONE = torch.empty(0)


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"ema.model.embed_tokens.weight": torch.ones(131, 24)}, "convert.dcp_several_models"),
        ({"model.embed_tokens.weight": GONE}, "convert.dcp_no_model"),
        ({"model.layers.1.mlp.up_proj.weight": GONE}, "convert.tensor_missing"),
        ({"model.layers.1.mlp.up_proj.lora": torch.ones(3)}, "convert.tensor_surplus"),
        ({"model.norm.weight": torch.ones(25)}, "convert.tensor_shape"),
        ({"_orig_mod.model.norm.weight": torch.ones(24)}, "convert.dcp_twice"),
    ],
)
def test_names_and_shapes_that_do_not_fit_are_refused(
    tensors: dict[str, Tensor], code: str, tmp_path: Path
) -> None:
    with raises(code):
        open_source(names_of(tensors, tmp_path))


def test_a_tied_head_that_is_another_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path, "llama")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with raises("convert.dcp_tied_differs", head="lm_head.weight"):
        open_source(folder)


class Foreign:
    """A class that no checkpoint has."""


def lose_shard(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def cut_shard(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])


def cut_metadata(folder: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:-50])


def replace_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Foreign()))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lose_shard, "__0_0.distcp, which is not in the folder"),
        (cut_shard, "it is not whole"),
        (cut_metadata, "is not opened: "),
        (replace_metadata, "Foreign, which is not among the classes that are let in"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    folder = write_dcp(tmp_path, "llama")
    shutil.copy(tmp_path / "hf/config.json", folder)
    damage(folder)
    command = [sys.executable, "-m", "megaprec", "convert", str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert told in line and str(folder) in line
    assert not (tmp_path / "out").exists()


def titan_state(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors by the names of torchtitan in 2025: of a llama, or with norms of queries."""
    model = from_hugging_face(config)
    names = ["attention.q_norm"] if model.qk_norm else []
    spelling = VersionSpelling.of(["output.weight", *(f"layers.0.{name}.weight" for name in names)])
    expected = matches(titan_rules(Path(), model, spelling), model)
    dice = torch.Generator().manual_seed(2)
    return {match.foreign: torch.randn(match.shape, generator=dice) for match in expected}


def test_names_of_older_versions_of_torchtitan_are_read_and_buffers_left_out(
    tmp_path: Path,
) -> None:
    state = titan_state(CONFIGS["llama"])
    assert "output.weight" in state and "layers.0.attention.wq.weight" in state
    state["freqs_cis"] = torch.ones(4, 3, dtype=torch.complex64)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    source = open_source(tmp_path)
    saved = state["layers.0.attention.wq.weight"]
    heads = source.read("weight/layers.0.attention.query.weight").view(4, 2, -1, 24)
    # Rotary partners, which were neighbours, are halves of a head.
    assert torch.equal(heads.transpose(1, 2).reshape(saved.shape), saved)
    assert torch.equal(source.read("weight/head.weight"), state["output.weight"])
    assert any("torchtitan's llama3" in note for note in source.facts.notes)


def test_the_order_of_rows_goes_by_the_norms_of_queries(tmp_path: Path) -> None:
    state = titan_state(CONFIGS["qwen3"])
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    source = open_source(tmp_path)
    query = source.read("weight/layers.0.attention.query.weight")
    assert torch.equal(query, state["layers.0.attention.wq.weight"])


@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [
        ("layers.1.moe.router.gate.weight", (4, 24), "convert.titan_model_unread"),
        ("layers.0.moe.experts.mlp1_weight", (4, 24, 24), "convert.titan_model_unread"),
        ("layers.0.attention.o_gate.weight", (24, 24), "convert.tensor_surplus"),
    ],
)
def test_models_of_torchtitan_that_are_not_read_are_refused(
    name: str, shape: tuple[int, ...], code: str, tmp_path: Path
) -> None:
    state = {**titan_state(CONFIGS["llama"]), name: torch.ones(shape)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with raises(code):
        open_source(tmp_path)


EXPERTS = [
    "layers.0.attention.q_norm.weight",
    "layers.0.moe.experts.w1",
    "layers.0.moe.expert_bias",
]


@pytest.mark.parametrize(
    ("bias", "width", "code"),
    [
        (0.0, 40, ""),
        (0.5, 40, "convert.titan_correction"),
        (0.0, 24, "convert.titan_experts_square"),
    ],
)
def test_a_correction_that_counts_and_experts_of_unknown_order_are_refused(
    bias: float, width: int, code: str, tmp_path: Path
) -> None:
    config = {**CONFIGS["qwen3_moe"], "moe_intermediate_size": width, "mlp_only_layers": []}
    config["decoder_sparse_step"] = 1
    model = from_hugging_face(config)
    state = {}
    for match in matches(titan_rules(Path(), model, VersionSpelling.of(EXPERTS)), model):
        state[match.foreign] = torch.ones(match.shape)
    state["layers.0.moe.expert_bias"] = torch.full((model.experts,), bias)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if code:
        with raises(code):
            open_source(tmp_path)
    else:
        assert open_source(tmp_path).model == model


def test_a_model_that_torchtitan_has_not_is_named(tmp_path: Path) -> None:
    dcp.save(titan_state(CONFIGS["llama"]), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-biased"]))
    with raises("convert.titan_model_differs", model="llama3"):
        open_source(tmp_path)


@pytest.mark.slow
def test_a_run_begins_with_a_checkpoint_of_fsdp(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path, "llama")
    shutil.copy(tmp_path / "hf/config.json", folder)
    ids = torch.randint(131, (400,), generator=torch.Generator().manual_seed(1))
    job = write_job(tmp_path, ids)
    losses = []
    for start in (tmp_path / "hf", folder):
        run = tmp_path / f"run-{start.name}"
        keys = [f"train.init_from={start}", f"train.folder={run}"]
        assert main(["train", str(job), *keys]) == 0
        losses.append([record["loss"] for record in steps(run)])
    # nothing beside the weights says what they are of: [model] does
    (folder / "config.json").unlink()
    (job.parent / "own.toml").write_text(OWN_MODEL + job.read_text())
    keys = [f"train.init_from={folder}", f"train.folder={tmp_path}/run-own"]
    assert main(["train", f"{job.parent}/own.toml", *keys]) == 0
    losses.append([record["loss"] for record in steps(tmp_path / "run-own")])
    assert losses == [losses[0]] * 3


def test_a_checkpoint_that_no_config_describes_is_that_of_the_run_file(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path, "llama")
    job = write_job(tmp_path, torch.arange(100))
    keys = [f"train.init_from={folder}"]
    with raises("convert.dcp_config_missing"):
        resolve_run(job, keys)
    own = tmp_path / "own.toml"
    own.write_text(OWN_MODEL + job.read_text())
    model = resolve_run(own, keys).model
    expected = open_source(tmp_path / "hf")
    ours = open_initial(folder, model)
    for key in expected.shapes:
        assert torch.equal(ours.read(key), expected.read(key)), key
    with raises("convert.dcp_vocabulary_open"):
        open_initial(folder, model.with_vocab(0))
    with raises("convert.dcp_mtp", mtp_layers=1):
        open_initial(folder, model.model_copy(update={"mtp_layers": 1}))
    wider = model.model_copy(update={"ffn": 44})
    with pytest.raises(UserError):
        open_initial(folder, wider)
    # a description beside the weights is stronger
    shutil.copy(tmp_path / "hf/config.json", folder)
    with raises("config.not_of_weights", key="model.ffn"):
        resolve_run(own, [*keys, "model.ffn=44"])
