"""Files beside the weights of a Hugging Face folder that make it another model, or none."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.parsing import read_json, read_regular
from tools.convert.core.tensors import Stored
from tools.convert.hf.kinds import short

POINTER = b"version https://git-lfs.github.com/spec/"
ADAPTER = "adapter_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_WEIGHTS = re.compile(
    r"(?:(?!optim|pytorch_optim).*\.safetensors)|(?:(?:pytorch|adapter)_)?model\b.*\.bin"
)
_AS_THEY_ARE = "the files were read as they are"
_OTHERS = {
    ".gguf": "llama.cpp",
    ".onnx": "ONNX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".pth": "its publisher",
}


def require_fetched(path: Path) -> None:
    """Raise UserError for a folder with a file that Git LFS has not fetched, of any format."""
    for file in sorted(path.iterdir()):
        if file.is_file() and file.stat().st_size < 1024 and read_regular(file).startswith(POINTER):
            raise UserError(
                f"{file} is a pointer of Git LFS, not the file itself: run git lfs pull in "
                "its folder"
            )


def require_no_adapter(path: Path) -> None:
    """Raise UserError for a folder with an adapter, which makes another model of weights of any
    format."""
    if (path / ADAPTER).is_file():
        raise UserError(
            f"{path / ADAPTER} says that the folder has an adapter, which is not read: merge "
            "it into the weights "
            "(merge_and_unload of peft), or take its files out"
        )


def require_plain(path: Path, indices: Mapping[str, str]) -> None:
    """Raise UserError for a folder with an adapter, or with weights in one file and in shards.

    indices: name of an index -> name of the file that holds everything.
    """
    require_no_adapter(path)
    for index, single in indices.items():
        if (
            (path / index).is_file()
            and (path / single).is_file()
            and single.encode() not in read_whole(path / index)
        ):
            raise UserError(
                f"{path} has both {single} and {index}, which names other files: take one of "
                "them out"
            )


def unread_weights(path: Path, read: Collection[Path]) -> str:
    """Return what to say of files beside those that were read that have names of weights; "" if
    there are none."""
    found = [
        f.name
        for f in sorted(path.iterdir())
        if f.is_file() and _WEIGHTS.fullmatch(f.name) and f not in read
    ]
    if not found:
        return ""
    others = f"{len(found) - 1} more {'files' if found[2:] else 'file'}"
    more = f" and {others} of weights are" if found[1:] else " is"
    return (
        f"{found[0]}{more} not read: {min(read).name if read else 'nothing'} and what belongs to "
        "it hold the model"
    )


def index_notes(index: Path, files: Mapping[str, Stored], in_bytes: bool) -> Iterator[str]:
    """Yield notes on what an index says of its shards, other than they are.

    files: the tensors in them, by name. in_bytes: total_size is in bytes; Colossal-AI counts in
        MiB, with fractions.
    """
    said = read_json(index)
    where = said["weight_map"]
    metadata = said.get("metadata")
    total = (metadata if isinstance(metadata, dict) else {}).get("total_size")
    there = sum(s.nbytes for s in files.values())
    if in_bytes and total not in (None, there):
        yield (
            f"{index.name} says total_size = {short(total)}, but its tensors have {there:,} "
            f"bytes: {_AS_THEY_ARE}"
        )
    odd = [
        (name, where.get(name), s.file.name)
        for name, s in files.items()
        if where.get(name) != s.file.name
    ]
    for name, named, file in odd[:1]:
        place = f"puts {name} in {named}, but it" if named else f"does not name {name}, which"
        more = f", and {len(odd) - 1} more such" if odd[1:] else ""
        yield f"{index.name} {place} is in {file}{more}: {_AS_THEY_ARE}"


def template_notes(path: Path) -> Iterator[str]:
    """Yield a note for each chat template in a file of its own."""
    yield from (
        f"{path / name} is not carried over: copy it where the tokenizer goes"
        for name in TEMPLATES
        if (path / name).exists()
    )


def other_weights(path: Path) -> str:
    """Return what to say of weights in formats that are not read; "" if there are none."""
    found = [file for file in sorted(path.iterdir()) if file.suffix in _OTHERS]
    if found:
        return f"; {found[0].name} has the format of {_OTHERS[found[0].suffix]}, which is not read"
    return ""
