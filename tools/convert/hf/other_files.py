"""Files beside the weights of a Hugging Face folder that make it another model, or none."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.parsing import read_json, read_regular
from tools.convert.core.tensors import Stored
from tools.convert.hf.keys import short

POINTER = b"version https://git-lfs.github.com/spec/"
ADAPTER = "adapter_config.json"
UNREAD_TEMPLATES = ("chat_template.json", "additional_chat_templates")
# Names of weights, but not of an optimizer's state.
_WEIGHTS = re.compile(
    r"(?:(?!optim|pytorch_optim).*\.safetensors)|(?:(?:pytorch|adapter)_)?model\b.*\.bin"
)
_AS_THEY_ARE = "the files were read as they are"
POINTER_BYTES = 1024  # more than a pointer of Git LFS has
_OTHER_FORMATS = {
    ".gguf": "llama.cpp",
    ".onnx": "ONNX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".pth": "its publisher",
}


def require_fetched(folder: Path) -> None:
    """Raise UserError for a folder with a file that Git LFS has not fetched, of any format."""
    for file in sorted(folder.iterdir()):
        # Only small files are opened: weights have gigabytes.
        is_small = file.is_file() and file.stat().st_size < POINTER_BYTES
        if is_small and read_regular(file).startswith(POINTER):
            raise UserError.of("convert.lfs_pointer", file=file)


def require_no_adapter(folder: Path) -> None:
    """Raise UserError for a folder with an adapter, which makes another model of weights of any
    format."""
    if (folder / ADAPTER).is_file():
        raise UserError.of("convert.adapter", path=folder / ADAPTER)


def require_plain(folder: Path, indices: Mapping[str, str]) -> None:
    """Raise UserError for a folder with an adapter, or with weights in one file and in shards.

    indices: name of an index -> name of the file that holds everything.
    """
    require_no_adapter(folder)
    for index, single in indices.items():
        # A single file that the index names is one of the shards.
        has_both = (folder / index).is_file() and (folder / single).is_file()
        if has_both and single.encode() not in read_whole(folder / index):
            raise UserError.of("convert.two_stores", path=folder, single=single, index=index)


def unread_weights(folder: Path, read_files: Collection[Path]) -> str:
    """Return what to say of files beside those that were read that have names of weights; "" if
    there are none."""
    unread = []
    for file in sorted(folder.iterdir()):
        if file.is_file() and _WEIGHTS.fullmatch(file.name) and file not in read_files:
            unread.append(file.name)
    if not unread:
        return ""
    are = " is"
    if len(unread) > 1:
        files = "files" if len(unread) > 2 else "file"
        are = f" and {len(unread) - 1} more {files} of weights are"
    first_read = min(read_files).name if read_files else "nothing"
    return f"{unread[0]}{are} not read: {first_read} and what belongs to it hold the model"


def index_notes(index: Path, file_tensors: Mapping[str, Stored], in_bytes: bool) -> Iterator[str]:
    """Yield notes on what an index says of its shards, other than they are.

    file_tensors: the tensors of the shards, by name.
    in_bytes: total_size is in bytes; Colossal-AI counts in MiB, with fractions.
    """
    content = read_json(index)
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual_size = sum(stored.nbytes for stored in file_tensors.values())
    # Counted by others in other units, or left from before a file was changed.
    if in_bytes and total_size not in (None, actual_size):
        yield (
            f"{index.name} says total_size = {short(total_size)}, but its tensors have "
            f"{actual_size:,} bytes: {_AS_THEY_ARE}"
        )
    weight_map = content["weight_map"]
    misplaced = []
    for name, stored in file_tensors.items():
        if weight_map.get(name) != stored.file.name:
            misplaced.append(name)
    if misplaced:
        name = misplaced[0]
        shard = weight_map.get(name)
        actual_shard = file_tensors[name].file.name
        statement = f"does not name {name}, which"
        if shard:
            statement = f"puts {name} in {shard}, but it"
        others = ""
        if len(misplaced) > 1:
            others = f", and {len(misplaced) - 1} more such"
        yield f"{index.name} {statement} is in {actual_shard}{others}: {_AS_THEY_ARE}"


def template_notes(folder: Path) -> Iterator[str]:
    """Yield a note for each chat template in another place than is usual."""
    for name in UNREAD_TEMPLATES:
        if (folder / name).exists():
            yield f"{folder / name} is not carried over: copy it where the tokenizer goes"


def other_weights(folder: Path) -> str:
    """Return what to say of weights in formats that are not read; "" if there are none."""
    for file in sorted(folder.iterdir()):
        other_format = _OTHER_FORMATS.get(file.suffix)
        if other_format:
            return f"; {file.name} has the format of {other_format}, which is not read"
    return ""
