"""Files beside weights that other programs would go by are refused or named, never passed over in
silence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.errors import UserError
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import sentence
from tools.cli import main
from tools.convert.formats import open_source

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid "
    "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
)
INDEX = "model.safetensors.index.json"


def shards_beside(path: Path) -> None:
    """Other weights, under the names that an upload of an older version has left."""
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name: t + 1 for name, t in tensors.items()},
        path / "a.safetensors",
        metadata={"format": "pt"},
    )
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))


def gguf(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model.gguf")


def write(name: str, content: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(content)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights twice": (
        shards_beside,
        sentence("convert.two_stores", single="model.safetensors", index=INDEX),
    ),
    "an adapter": (
        write("adapter_config.json", "{}"),
        sentence("convert.adapter"),
    ),
    "weights not fetched": (
        write("model.safetensors", POINTER),
        sentence("convert.lfs_pointer"),
    ),
    "a config not fetched": (
        write("config.json", POINTER),
        sentence("convert.lfs_pointer"),
    ),
    "a tokenizer not fetched": (
        write("tokenizer.json", POINTER),
        sentence("convert.lfs_pointer"),
    ),
    "another format": (gguf, "model.gguf has the format of llama.cpp, which is not read"),
    "a key twice": (
        write("config.json", '{"model_type": "llama", "model_type": "llama"}'),
        "key 'model_type' twice",
    ),
    "damaged settings": (
        write("tokenizer_config.json", "{"),
        sentence("megaprec.file_unreadable", path=re.compile(r"tokenizer_config\.json")),
    ),
    "a list of settings": (
        write("special_tokens_map.json", "[]"),
        sentence("megaprec.not_json_object", path=re.compile(r"special_tokens_map\.json")),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_ambiguous_or_not_whole_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = REFUSED[case]
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    change(path)
    with pytest.raises(UserError, match=message):
        open_source(path)
    assert main(["inspect", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_index_of_one_file_beside_that_file_is_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    names = load_file(path / "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert len(open_source(path).shapes) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        "model.fp16.safetensors",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "value_head.safetensors",
    ],
)
def test_weights_beside_those_that_are_read_are_noted(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    for other in (name, "optimizer.bin", "optimizer.safetensors", "training_args.bin"):
        (path / other).touch()
    (note,) = open_source(path).facts.notes
    assert (
        note
        == f"{path}: {name} is not read: model.safetensors and what belongs to it hold the model"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.json", "{}"), ("additional_chat_templates", "")],
)
def test_chat_templates_that_are_not_carried_over_are_noted(
    name: str, content: str, tmp_path: Path
) -> None:
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    (path / name).write_text(content) if content else (path / name).mkdir()
    (note,) = open_source(path).facts.notes
    assert note == f"{path / name} is not carried over: copy it where the tokenizer goes"


def sharded(path: Path) -> dict[str, Any]:
    """Put a folder's weights in two shards; return their index, which is not written."""
    tensors = load_file(path / "model.safetensors")
    where = dict[str, str]()
    (path / "model.safetensors").unlink()
    for number in (0, 1):
        part = {name: t for n, (name, t) in enumerate(sorted(tensors.items())) if n % 2 == number}
        save_file(part, path / f"{number}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(part, f"{number}.safetensors")
    return {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": where,
    }


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: None, ""),
        (lambda index: index.pop("metadata"), ""),
        (lambda index: index.update(metadata=None), ""),
        (
            lambda index: index["metadata"].update(total_size=7),
            "says total_size = 7, but its tensors have 59,088 bytes",
        ),
        (
            lambda index: index["weight_map"].update({EMBEDDING: "0.safetensors"}),
            f"puts {EMBEDDING} in 0.safetensors, but it is in 1.safetensors",
        ),
        (
            lambda index: index["weight_map"].pop(EMBEDDING),
            f"does not name {EMBEDDING}, which is in 1.safetensors",
        ),
    ],
)
def test_an_index_that_says_otherwise_than_its_shards_is_noted(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    index = sharded(path)
    change(index)
    (path / INDEX).write_text(json.dumps(index))
    notes = open_source(path).facts.notes
    assert notes == ((f"{path}: {INDEX} {said}: the files were read as they are",) if said else ())


@pytest.mark.parametrize(("base", "noted"), [(1e4, False), (77.0, True)])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_saved_angles_that_are_not_those_of_the_config_are_noted(
    name: str, base: float, noted: bool, tmp_path: Path
) -> None:
    """Older versions of transformers saved them. In bf16 too, and before they were scaled."""
    path = write_folder(tmp_path / "hf", "llama-stretched", torch.bfloat16, rope_theta=1e4)
    angles = (base ** (-torch.arange(0, 10, 2) / 10)).bfloat16()
    save_file(load_file(path / "model.safetensors") | {name: angles}, path / "model.safetensors")
    said = (
        (
            f"{path}: {name} has other angles than config.json says, which is followed: "
            "rope_theta may be another there"
        ),
    )
    assert open_source(path).facts.notes == (said if noted else ())


@pytest.mark.parametrize(
    ("ids", "noted"),
    [
        ({"eos_token_id": 131}, True),
        ({"eos_token_id": [1, 400]}, True),
        ({"pad_token_id": -1}, False),
        ({}, False),
    ],
)
def test_ids_that_the_vocabulary_does_not_have_are_named(
    ids: dict[str, Any], noted: bool, tmp_path: Path
) -> None:
    path = write_folder(tmp_path / "hf", "llama", torch.bfloat16)
    (path / "config.json").write_text(json.dumps(CONFIGS["llama"] | ids))
    found = [
        note for note in open_source(path).facts.notes if "which no token of vocab_size has" in note
    ]
    assert bool(found) == noted and all(key in found[0] for key in ids if noted)
