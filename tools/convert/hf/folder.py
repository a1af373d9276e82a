"""Reading and writing Hugging Face folders: config.json, safetensors (or an older
pytorch_model.bin), tokenizer files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial as bind
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.data.tokenizer import load_tokenizer
from megaprec.data.tokenizer_files import SETTINGS
from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.names import BUFFERS, HUGGING_FACE, IN_HALVES, PREFIXES
from tools.convert.core.rules import Match, heads, matches
from tools.convert.core.rules import has_modules as has_rows
from tools.convert.core.source import Facts, Origin, Source
from tools.convert.core.target import Location, Target, Write
from tools.convert.core.tensors import Stored, reserve_safetensors, safetensors_in
from tools.convert.core.torch_files import tensors_in
from tools.convert.core.transforms import SAME
from tools.convert.hf.beside import (
    index_notes,
    other_weights,
    require_plain,
    template_notes,
    unread_weights,
)
from tools.convert.hf.config import from_hugging_face, special_ids
from tools.convert.hf.modules import copies, has_modules, left_modules, take_copies
from tools.convert.hf.notes import notes, rotary_notes
from tools.convert.hf.quantized import quantized_notes, with_quantized
from tools.convert.hf.stacked import unstack_experts
from tools.convert.hf.vocabulary import main_file, require_writable, write_tokenizer
from tools.convert.hf.wrapped import text_config, text_tensors, wrapped_notes
from tools.convert.hf.write_config import ARCHITECTURES, model_type, to_hugging_face, unsaid

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS: tuple[
    tuple[str, str, Callable[[Path], dict[str, Stored]]], ...
] = (  # an index of shards, or one file
    ("model.safetensors.index.json", "model.safetensors", safetensors_in),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", tensors_in),
)
NO_FACTS = Facts()
SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", *SETTINGS)


def find_hf(path: Path) -> Path | None:
    """Return `path` if it is a Hugging Face folder."""
    return path if (path / CONFIG).is_file() else None


def read_generation(path: Path) -> dict[str, Any]:
    """Return the contents of a folder's generation_config.json; empty if there is none."""
    return read_json(path / GENERATION) if (path / GENERATION).is_file() else {}


def write_generation(path: Path, said: Mapping[str, Any]) -> None:
    """Writes a folder's generation_config.json."""
    _write_json(path / GENERATION, said)


def read_config(path: Path) -> dict[str, Any]:
    """Return a folder's config.json, of a model with other inputs than text that of its text
    model."""
    return dict(_named(path, text_config, read_json(path / CONFIG)))


def hf_model(path: Path) -> ModelConfig:
    """Return the model of a folder's config.json, with the modules of multi-token prediction that
    its files hold."""
    model = _named(path, from_hugging_face, read_config(path))
    if model.mtp_layers and has_modules(model, _names(path)):
        return model
    return model.alone


def _named(path: Path, read: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    """Return what is read from a config.json. UserErrors name the folder."""
    try:
        return read(config)
    except UserError as error:
        raise UserError(*(f"{path}: {problem}" for problem in error.problems)) from error


def in_fp8(path: Path) -> bool:
    """Return True if the config.json of a folder says that its weights are in FP8."""
    said = read_config(path).get("quantization_config") if find_hf(path) else None
    return isinstance(said, dict) and said.get("quant_method") == "fp8"


def hf_tokenizer(path: Path) -> list[Path]:
    """Return the tokenizer files of a folder. Raises UserError for settings that are no JSON
    objects."""
    for name in SETTINGS:
        if (path / name).is_file():
            read_json(path / name)
    return [path / name for name in TOKENIZER_FILES if (path / name).is_file()]


def open_hf(path: Path, system: str = "hf", facts: Facts = NO_FACTS) -> Source:
    """Open a folder, which another system may have written.

    Raises UserError for missing, surplus and misshapen tensors, damaged files and unknown models.
    """
    model = hf_model(path)
    config = read_config(path)
    whole = read_json(path / CONFIG)
    kind = config["model_type"]
    files = _stored(path)
    as_named = _named_like_the_table(text_tensors(files, whole), PREFIXES.get(kind, "model."))
    as_named = unstack_experts(as_named, kind)
    stored = with_quantized(as_named, config, path)
    halves = config.get("rope_interleave", True) is False
    found = matches((IN_HALVES if halves else HUGGING_FACE)[kind], model)
    check_tied(path, model, stored, found)
    take_copies(path, model, stored)
    check_tensors(path, found, stored)
    origins = [
        replace(origin, rows=stored[m.foreign].rows if m.how is SAME else None)
        for m in found
        for origin in (origin_of(m, stored[m.foreign].read, stored[m.foreign].dtype, model),)
    ]
    own_notes = notes(config, ARCHITECTURES[kind], model.mtp_layers > 0)
    indices = [path / index for index, _, _ in WEIGHTS if (path / index).is_file()]
    of_index = index_notes(indices[0], files, system == "hf") if indices else ()
    of_files = (
        *wrapped_notes(files, whole),
        *quantized_notes(config),
        *rotary_notes(model, files),
        *of_index,
    )
    found_notes = *own_notes, *of_files
    unread = unread_weights(path, {one.file for one in files.values()})
    said = tuple(f"{path}: {note}" for note in (*found_notes, *([unread] if unread else [])))
    told = (*facts.notes, *said, *template_notes(path))
    facts = replace(
        facts, special=special_ids(config), generation=read_generation(path), notes=told
    )
    return Source(path, system, model, origins, facts, hf_tokenizer(path))


def origin_of(
    match: Match, read: Any, dtype: torch.dtype, model: ModelConfig, kind: str = "weight"
) -> Origin:
    """Return the origin whose foreign tensor `read` returns."""
    sizes = heads(model)
    keys = tuple(f"{kind}/{name}" for name in match.logical)
    parts = match.how.split(torch.empty(match.shape, device="meta"), sizes)
    shapes = tuple(tuple(part.shape) for part in parts)
    return Origin(
        f"{kind}/{match.foreign}", keys, shapes, dtype, lambda: match.how.split(read(), sizes)
    )


def has_weights(path: Path) -> bool:
    """Return True if the folder holds weights in Hugging Face's format."""
    return any((path / name).is_file() for index, single, _ in WEIGHTS for name in (index, single))


def _stored(path: Path) -> dict[str, Stored]:
    """Return all tensors of the folder by their names in it."""
    require_plain(path, {index: single for index, single, _ in WEIGHTS})
    for index, single, reader in WEIGHTS:
        if (path / index).is_file():
            return _sharded(path, index, reader)
        if (path / single).is_file():
            return reader(path / single)
    none = "neither model.safetensors nor pytorch_model.bin, nor an index of shards"
    raise UserError(f"{path} has no weights: {none}{other_weights(path)}")


def _names(path: Path) -> set[str]:
    """Return the names of all tensors of the folder, of shards by their index; none if it has no
    weights."""
    for index, single, reader in WEIGHTS:
        if (path / index).is_file():
            where = read_json(path / index).get("weight_map")
            return set(where) if isinstance(where, dict) else set()
        if (path / single).is_file():
            return set(reader(path / single))
    return set()


def _sharded(path: Path, index: str, reader: Any) -> dict[str, Stored]:
    where = read_json(path / index).get("weight_map")
    if not isinstance(where, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in where.values()
    ):
        raise UserError(f"{path / index} has no weight_map of files in the folder")
    if missing := sorted({f for f in where.values() if not (path / f).is_file()}):
        raise UserError(*(f"{path / f} is missing; {index} names it" for f in missing))
    stored: dict[str, Stored] = {}
    for file in sorted(set(where.values())):
        tensors = reader(path / file)
        if twice := sorted(tensors.keys() & stored.keys()):
            raise UserError(f"{path}: {twice[0]} is in two files")
        stored |= tensors
    if lost := sorted(where.keys() - stored.keys()):
        raise UserError(f"{path}: {index} names {lost[0]}, which no file holds")
    return stored


def _named_like_the_table(stored: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    """Return the tensors without buffers, with the prefix that a folder saved without the head
    omits."""
    kept = {name: s for name, s in stored.items() if not name.endswith(BUFFERS)}
    if any(name.startswith(prefix) or f".{prefix}" in name for name in kept):
        return kept
    return {prefix + name: s for name, s in kept.items()}


def check_tied(
    path: Path, model: ModelConfig, stored: dict[str, Any], found: Sequence[Match]
) -> None:
    """Check that a tied head that was saved nevertheless equals the embedding; it is then
    dropped."""
    embedding = next(match.foreign for match in found if match.logical == ("embedding.weight",))
    for head in ("lm_head.weight", "embed_out.weight"):
        if model.tied and head in stored and embedding in stored:
            if not same_values(stored[head].read(), stored[embedding].read()):
                raise UserError(
                    f"{path}: {head} differs from {embedding}, but config.json says that they "
                    "are tied: set "
                    f"tie_word_embeddings = false in {path / CONFIG} to keep both as they "
                    f"are; or remove {head} from "
                    "the files to have the embedding for both"
                )
            del stored[head]


def check_tensors(path: Path, found: Sequence[Match], stored: Mapping[str, Any]) -> None:
    """Raise UserError unless `stored` are exactly the tensors of `found`, with the same shapes, of
    floats."""
    expected = {match.foreign: match.shape for match in found}
    first = next(iter(expected), "")
    if (
        wrapped := [name for name in stored if name.endswith(f".{first}")]
        if first not in stored
        else []
    ):
        before = wrapped[0].removesuffix(first)
        raise UserError(
            f"{path}: names of tensors begin with {before!r}, as in {wrapped[0]}, and those "
            "of its model do not: save "
            "the state of the model itself, not of what is around it"
        )
    problems = [
        f"{path} lacks the tensor {name} {list(shape)}"
        for name, shape in expected.items()
        if name not in stored
    ]
    problems += [
        f"{path} has the tensor {name}, which its model has no place for"
        for name in stored
        if name not in expected
    ]
    problems += [
        f"{path}: {name} is {list(stored[name].shape)}, but the model asks for {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    problems += [
        (
            f"{path}: {name} is {str(stored[name].dtype).removeprefix('torch.')}, not floats: "
            "such weights are not read"
        )
        for name in expected
        if name in stored
        and not (stored[name].dtype.is_floating_point and stored[name].dtype.itemsize > 1)
    ]
    if problems:
        raise UserError(
            *problems[:10], *([f"... and {len(problems) - 10} more"] if len(problems) > 10 else [])
        )


def hf_target(source: Source, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES) -> Target:
    """Return a target with the weights of `source` in `dtype`, or in their own dtypes.

    Raises UserError for a tokenizer that the format cannot hold, or whose package is missing.
    """
    require_writable(source.tokenizer)
    rules = HUGGING_FACE[model_type(source.model)]
    source, left = (source, ()) if has_rows(rules) else (source.alone, left_modules(source.model))
    model = source.model
    sizes = heads(source.model)
    found = matches(rules, model)
    again = [*copies(model)]
    kept = {
        match: source.dtype_in(f"weight/{match.logical[0]}", dtype) for match in (*found, *again)
    }
    shards = _shards(kept, shard_bytes)
    size = sum(prod(match.shape) * held.itemsize for match, held in kept.items())

    def reserve(folder: Path, write: bool) -> list[Write]:
        places = dict[Match, Location]()
        for file, inside in shards.items():
            starts = reserve_safetensors(
                folder / file, {m.foreign: (kept[m], m.shape) for m in inside}, write
            )
            places |= {m: Location(file, starts[m.foreign], bind(_as, kept[m])) for m in inside}
        writes = []
        for m in found:
            keys = tuple(f"weight/{name}" for name in m.logical)
            same = [c for c in again if c.logical == m.logical]
            own = tuple(places[one] for one in (m, *same))
            writes.append(
                Write(m.foreign, keys, bind(_join, m, sizes), own, m.how is SAME and not same)
            )
        return writes

    def finish(folder: Path) -> None:
        weights = next(iter(kept.values()))
        ids = special_ids_of(source)
        _write_json(
            folder / CONFIG, to_hugging_face(model, str(weights).removeprefix("torch.")) | ids
        )
        write_generation(folder, source.facts.generation or ids)
        if len(shards) > 1:
            where = {m.foreign: file for file, inside in shards.items() for m in inside}
            index = {"metadata": {"total_size": size}, "weight_map": where}
            _write_json(folder / "model.safetensors.index.json", index)
        write_tokenizer(source.tokenizer, folder, ids["bos_token_id"])

    dtypes = {f"weight/{name}": kept[match] for match in found for name in match.logical}
    describe = {"to": "hf", "dtype": str(dtype), "shard": shard_bytes}
    return Target(describe, size, dtypes, reserve, finish, open_hf, (*unsaid(model), *left))


def _as(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values.to(dtype)


def _join(match: Match, sizes: Any, parts: Sequence[Tensor]) -> Tensor:
    return match.how.join(parts, sizes)


def _shards(kept: Mapping[Match, torch.dtype], shard_bytes: int) -> dict[str, list[Match]]:
    """Return file name -> tensors. No file is larger than `shard_bytes`, unless a single tensor
    is."""
    groups: list[list[Match]] = [[]]
    room = shard_bytes
    for match, dtype in kept.items():
        nbytes = prod(match.shape) * dtype.itemsize
        if groups[-1] and nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(match)
        room -= nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{n:05d}-of-{len(groups):05d}.safetensors": group
        for n, group in enumerate(groups, 1)
    }


def special_ids_of(source: Source) -> dict[str, Any]:
    """Return the ids of special tokens as a config.json has them: those of the source, or of its
    tokenizer."""
    return {"bos_token_id": None, "eos_token_id": None} | (
        source.facts.special or tokenizer_ids(source)
    )


def tokenizer_ids(source: Source) -> dict[str, int | None]:
    """Return the ids of the tokens that begin and end a document, as far as the tokenizer has them.

    A model trained by megaprec has seen the end token before each document, whatever begin token
    the tokenizer names.
    """
    file = main_file(source.tokenizer)
    if file is None:
        return {"bos_token_id": None, "eos_token_id": None}
    tokenizer = load_tokenizer(file)
    return {"bos_token_id": tokenizer.eos, "eos_token_id": tokenizer.eos}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
