"""A distributed checkpoint that Megatron-core saved without args: what the model is comes from a
run file."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.other_systems import write_folder
from tests.refusals import shows
from tools.cli import main
from tools.convert.core.names import megatron
from tools.convert.core.rules import head_sizes, matches
from tools.convert.formats import open_source

pytestmark = [
    pytest.mark.usefixtures("torch_files_read_here"),
    pytest.mark.filterwarnings("ignore"),  # torch's, about saving without ranks
]
RUN = """
[model]
family = "llama"
layers = 4
hidden = 24
heads = 4
kv_heads = 2
head_dim = 10
ffn = 40
vocab = 131
max_positions = 48
[data]
source = "text"
vocab_size = 131
[train]
steps = 1
global_batch = 1
micro_batch = 1
seq_length = 16
folder = "runs/mine"
"""


def bare(folder: Path) -> tuple[Path, Path]:
    """Return a folder of Hugging Face's, and its model as Megatron-core saves it, with rows that
    pad the vocabulary."""
    there = write_folder(folder / "hf", "llama")
    source = open_source(there)
    model = source.model
    sizes = head_sizes(source.model)
    state = {}
    for match in matches(megatron(True, False, model), model):
        parts = [source.read(f"weight/{name}") for name in match.logical]
        whole = match.how.join(parts, sizes).contiguous()
        if match.cut == "vocabulary":
            state[match.foreign] = torch.nn.functional.pad(whole, (0, 0, 0, 5))
        else:
            state[match.foreign] = whole
    (folder / "core").mkdir()
    dcp.save(state, checkpoint_id=folder / "core", no_dist=True)
    # As Megatron-core writes it, by which its checkpoints are told from others of PyTorch.
    (folder / "core" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return there, folder / "core"


def test_a_bare_checkpoint_of_megatron_core_is_read_as_a_run_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, core = bare(tmp_path)
    assert main(["convert", str(core), str(tmp_path / "refused")]) == 2
    assert shows(
        capsys.readouterr().err,
        "convert.megatron_no_args",
        way_out=re.compile("megaprec convert --config RUN.toml reads the weights"),
    )
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    given = ["--config", str(run), "--verify", "logits"]
    assert main(["convert", str(core), str(tmp_path / "out"), *given]) == 0
    assert "what the model is was taken from the run file" in capsys.readouterr().out
    ours = open_source(tmp_path / "out")
    theirs = open_source(there)
    assert ours.shapes == theirs.shapes
    for key in ours.shapes:
        assert torch.equal(ours.read(key), theirs.read(key)), key


def test_a_run_file_of_another_model_names_the_tensor_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, core = bare(tmp_path)
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("ffn = 40", "ffn = 48"))
    assert main(["convert", str(core), str(tmp_path / "out"), "--config", str(run)]) == 2
    assert shows(
        capsys.readouterr().err,
        "convert.tensor_shape",
        name=re.compile("mlp.linear_fc1.weight"),
        shape="[80, 24]",
        expected_shape="[96, 24]",
    )


def test_a_run_file_is_refused_where_the_folder_itself_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    there = write_folder(tmp_path / "hf", "llama")
    assert (
        main(["convert", str(there), str(tmp_path / "meg"), "--to", "megatron", "--no-verify"]) == 0
    )
    for folder, code in (
        (there, "convert.config_unused"),
        (tmp_path / "meg", "convert.megatron_config_unused"),
    ):
        assert main(["convert", str(folder), str(tmp_path / "out"), "--config", str(run)]) == 2
        assert shows(capsys.readouterr().err, code, path=re.compile(f"^{folder}"))
