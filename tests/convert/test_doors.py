"""The doors of `megaprec convert`: options without use, folders that are not meant, adapters beside
weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.errors import UserError
from tests.convert import test_nemo
from tests.convert.test_colossalai import save as save_colossalai
from tests.convert.test_nxd import EVEN, wholes
from tests.internevo import Form as InternEvoForm
from tests.internevo import save as save_internevo
from tests.internevo import weights
from tests.nxd import Form
from tests.nxd import save as save_nxd
from tests.other_systems import write_folder
from tests.refusals import sentence, shows
from tools.cli import main
from tools.convert.formats import open_source

pytestmark = [
    pytest.mark.usefixtures("torch_files_read_here"),
    pytest.mark.filterwarnings("ignore"),  # torch's, about saving without ranks
]


def nxd(folder: Path) -> Path:
    config, whole = wholes(folder, **EVEN)
    return save_nxd(folder / "run", config, whole, Form(tp=2))


def colossalai(folder: Path) -> Path:
    return save_colossalai(
        folder / "epoch/modeling", write_folder(folder / "hf", "llama"), 1, True
    ).parent


def internevo(folder: Path) -> Path:
    return save_internevo(folder / "step", InternEvoForm(), weights(InternEvoForm()), tp=2)


def hugging_face(folder: Path) -> Path:
    return write_folder(folder / "hf", "llama")


WITHOUT_VOCAB = [nxd, colossalai, internevo, hugging_face]
ALL = [*WITHOUT_VOCAB, test_nemo.save]


def said_by(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("make", WITHOUT_VOCAB)
def test_a_vocabulary_that_nothing_asks_for_is_refused(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path)
    for command in (
        ("convert", folder, tmp_path / "out"),
        ("inspect", folder),
        ("diff", folder, folder),
    ):
        assert shows(
            said_by(capsys, *command, "--vocab", 100),
            "convert.vocab_unused",
            formats="Megatron-LM and NeMo",
        )
    assert shows(said_by(capsys, "inspect", folder, "--vocab", 0), "convert.vocab_option", vocab=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option",
    [
        ("--tp", 2),
        ("--tp", 0),
        ("--pp", 1),
        ("--ep", 1),
        ("--layers", "te"),
        ("--grouped-experts",),
    ],
)
@pytest.mark.parametrize("to", ["hf", "megaprec"])
def test_a_layout_of_megatron_is_refused_for_other_targets(
    to: str, option: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_by(capsys, "convert", hugging_face(tmp_path), tmp_path / "out", "--to", to, *option)
    assert shows(said, "command.megatron_option", option=str(option[0])[2:], format_name=to)


def test_grouped_experts_need_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--to", "megatron", "--grouped-experts")
    said = said_by(capsys, "convert", hugging_face(tmp_path), tmp_path / "out", *options)
    assert shows(said, "convert.target_no_experts")


@pytest.mark.parametrize("make", ALL)
def test_what_is_for_megatron_alone_is_refused_for_all_others(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_by(capsys, "convert", make(tmp_path), tmp_path / "out", "--weights-only")
    assert shows(said, "convert.weights_only_unused")


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("make", ALL)
def test_an_adapter_beside_weights_of_any_format_is_refused(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert shows(refused(folder), "convert.adapter")


def test_an_adapter_alone_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert shows(refused(tmp_path), "convert.adapter")


@pytest.mark.parametrize("make", ALL)
def test_the_folder_above_names_the_one_that_may_be_meant(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    folder.rename(tmp_path / "the one")
    shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    said = sentence(
        "convert.format_unknown", path=tmp_path, hint=", but its the one has one: give that"
    )
    assert re.search(f"{said}$", refused(tmp_path))


@pytest.mark.parametrize(
    "inside", ["model_weights.ckpt", "mp_rank_00/model_weights.ckpt", "model_weights/.metadata"]
)
def test_checkpoints_of_nemo_1_are_refused_with_a_way_out(inside: str, tmp_path: Path) -> None:
    file = tmp_path / "m" / inside
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    (tmp_path / "m/model_config.yaml").write_text("num_layers: 4\n")
    for folder in {tmp_path / "m", file.parent}:
        assert shows(refused(folder), "convert.nemo1", older=re.compile("model_config.yaml$"))
    archive = tmp_path / "one.nemo"
    archive.write_bytes(b"")
    assert shows(refused(archive), "convert.nemo1", older=archive) and shows(
        refused(tmp_path), "convert.nemo1", older=archive
    )


def test_weights_of_nemo_without_their_context_say_what_is_missing(tmp_path: Path) -> None:
    folder = test_nemo.save(tmp_path)
    shutil.rmtree(folder / "context")
    assert shows(
        refused(folder / "weights"),
        "convert.megatron_no_args",
        way_out=re.compile("NeMo says it in a folder context/ beside weights/, and it is missing"),
    )


def test_indices_of_stages_beside_an_older_index_are_not_a_checkpoint(tmp_path: Path) -> None:
    folder = colossalai(tmp_path) / "modeling"
    (folder / "tmp_index_files").mkdir()
    assert shows(
        refused(folder),
        "convert.colossal_not_whole",
        stages="tmp_index_files",
        older=re.compile("the index beside it is of an earlier save"),
    )


def test_weights_that_no_index_names_are_noted(tmp_path: Path) -> None:
    folder = colossalai(tmp_path) / "modeling"
    assert not open_source(folder).facts.notes
    torch.save({}, folder / "pytorch_model-stage-00003-shard-00001.bin")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (note,) = open_source(folder).facts.notes
    assert "pytorch_model-stage-00003-shard-00001.bin is not read: model-00001.safetensors" in note
    shutil.copy(folder / "model-00001.safetensors", folder / "model-00007.safetensors")
    (note,) = open_source(folder).facts.notes
    assert "model-00007.safetensors and 1 more file of weights are not read" in note
    assert len(load_file(folder / "model-00001.safetensors")) < len(index["weight_map"])


def test_a_comparison_that_rounding_would_fail_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "half", "llama", torch.bfloat16)
    options = ("--verify", "logits", "--dtype")
    assert main(["convert", str(folder), str(tmp_path / "wide"), *options, "fp32"]) == 0
    assert "FP32 differ by at most" in capsys.readouterr().out
    for there, dtype in ((folder, "fp16"), (tmp_path / "wide", "bf16")):
        said = said_by(capsys, "convert", there, tmp_path / "out", *options, dtype)
        assert (
            shows(said, "convert.verify_dtype", key="weight/embedding.weight")
            and not (tmp_path / "out").exists()
        )


def test_logits_that_are_nan_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hugging_face(tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][0] = torch.nan
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = said_by(capsys, "convert", folder, tmp_path / "out", "--verify", "logits")
    assert shows(said, "convert.verify_not_finite", path=folder)


def test_a_link_to_nowhere_is_no_free_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    assert shows(
        said_by(capsys, "convert", hugging_face(tmp_path), tmp_path / "out"),
        "command.folder_exists",
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_of_what_is_around_a_model_are_told_in_one_line(prefix: str, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(
        {prefix + name: values for name, values in stored.items()}, folder / "pytorch_model.bin"
    )
    assert shows(
        refused(folder),
        "convert.hf_name_prefix",
        path=folder,
        prefix=prefix,
        name=re.compile(f"^{re.escape(prefix)}model.embed"),
    )


def test_an_archive_of_nemo_beside_a_checkpoint_of_megatron_is_some_other_file(
    tmp_path: Path,
) -> None:
    options = ("--to", "megatron", "--no-verify")
    assert main(["convert", str(hugging_face(tmp_path)), str(tmp_path / "there"), *options]) == 0
    (tmp_path / "there/one.nemo").write_bytes(b"")
    assert open_source(tmp_path / "there").kind == "megatron"
