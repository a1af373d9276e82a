"""Colossal-AI's sharded checkpoints: Hugging Face's tensors in shards of its own naming, with and
without stages."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaprec.errors import UserError
from tests.convert.test_untrusted import Malice
from tests.other_systems import slow, write_folder
from tests.refusals import shows
from tools.cli import main
from tools.convert.formats import open_source

here = pytest.mark.usefixtures("torch_files_read_here")


def save(folder: Path, hf: Path, stages: int, safe: bool) -> Path:
    """As hybrid_parallel_checkpoint_io.py:save_sharded_model; two shards of each stage."""
    folder.mkdir(parents=True)
    kind, name = ("safetensors", "model") if safe else ("bin", "pytorch_model")
    where: dict[str, str] = {}
    whole = load_file(hf / "model.safetensors")
    parts = [dict(list(whole.items())[n :: 2 * stages]) for n in range(2 * stages)]
    for number, part in enumerate(parts):
        stage, shard = divmod(number, 2)
        if stages > 1:
            ending = f"stage-{stage + 1:05d}-shard-{shard + 1:05d}"
        else:
            ending = f"{number + 1:05d}"
        file = f"{name}-{ending}.{kind}"
        where |= dict.fromkeys(part, file)
        put(folder / file, part, safe)
    size = sum(t.nbytes for t in whole.values()) / 1024**2  # in MiB, as its calculate_tensor_size
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / f"{name}.{kind}.index.json").write_text(json.dumps(index))
    shutil.copy(hf / "config.json", folder)
    return folder


def put(file: Path, part: Mapping[str, Tensor], safe: bool) -> None:
    if safe:
        save_file(dict(part), file)
    else:
        torch.save(dict(part), file)


@here
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_it_is_the_hugging_face_model(
    stages: int, safe: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    save(tmp_path / "epoch-0/modeling", hf, stages, safe)
    (tmp_path / "epoch-0/optimizer").mkdir()
    (tmp_path / "epoch-0/lr_scheduler").write_bytes(b"")
    for folder in (tmp_path / "epoch-0", tmp_path / "epoch-0/modeling"):
        source = open_source(folder)
        expected = open_source(hf)
        assert (source.kind, source.model) == ("colossalai", expected.model)
        assert set(source.shapes) == set(expected.shapes)
        assert all(torch.equal(source.read(key), expected.read(key)) for key in source.shapes)
        assert source.facts.unread == "the optimizer's state, lr_scheduler"
    assert main(["convert", str(tmp_path / "epoch-0"), str(tmp_path / "ours")]) == 0
    assert "not read: the optimizer's state, lr_scheduler" in capsys.readouterr().out


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder)
    return "\n".join(caught.value.problems)


@here
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    folder = save(tmp_path / "shards", hf, 2, False)
    lost = folder / "pytorch_model-stage-00002-shard-00001.bin"
    lost.rename(tmp_path / "kept")
    assert shows(refused(folder), "convert.shard_missing", path=lost)
    (tmp_path / "kept").rename(lost)
    torch.save({**torch.load(lost), "model.x": torch.zeros(2)}, lost)
    assert shows(refused(folder), "convert.tensor_surplus", name="model.x")
    (folder / "config.json").unlink()
    assert shows(refused(folder), "convert.colossal_config_missing")
    (folder / "pytorch_model.bin.index.json").unlink()
    (folder / "tmp_index_files").mkdir()
    assert shows(refused(folder), "convert.colossal_not_whole", stages="tmp_index_files")


@here
def test_shards_of_transformers_are_not_taken_for_them(tmp_path: Path) -> None:
    hf = write_folder(tmp_path / "hf", "llama")
    names = list(load_file(hf / "model.safetensors"))
    file = "model-00001-of-00001.safetensors"
    (hf / "model.safetensors").rename(hf / file)
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, file)})
    )
    assert open_source(hf).kind == "hf"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("stages", [1, *slow((2,))])
def test_a_hostile_pickle_does_not_run(
    stages: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "shards", write_folder(tmp_path / "hf", "llama"), stages, False)
    file = min(folder.glob("pytorch_model-*.bin"))
    torch.save({"model.norm.weight": Malice(tmp_path / "ran")}, file)
    assert main(["inspect", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{file} is not opened" in said and "getoutput" in said and "Traceback" not in said
    assert not (tmp_path / "ran").exists()
