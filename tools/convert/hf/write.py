"""Writing a Hugging Face folder: config.json, weights in safetensors, files of the tokenizer."""

import json
from collections.abc import Mapping, Sequence
from functools import partial as bind
from math import prod
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from megaprec.durable import put_text
from megaprec.text.tokenizer import load_tokenizer
from models.config import ModelConfig
from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import Match, NameRule, has_module_rules, head_sizes, matches
from tools.convert.core.source import Source
from tools.convert.core.target import Location, Target, Write
from tools.convert.core.tensors import reserve_safetensors, torch_name
from tools.convert.core.transforms import SAME
from tools.convert.hf.card import write_card
from tools.convert.hf.config import config_of, model_type_of, omitted_settings
from tools.convert.hf.folder import CONFIG, GENERATION, constants, module_copies, open_hf
from tools.convert.hf.vocabulary import main_file, require_writable, write_tokenizer

SHARD_BYTES = 5_000_000_000  # as transformers 4 has it


def hf_target(source: Source, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES) -> Target:
    """Return a target with the weights of `source` in `dtype`, or in their own dtypes.

    shard_bytes: the largest size of a file with several tensors.
    Raises UserError for a tokenizer that the format cannot hold, or whose package is missing.
    """
    # At once, and not after hours of writing weights.
    require_writable(source.tokenizer)
    model_type = model_type_of(source.model)
    rules = HUGGING_FACE[model_type]
    left_out = left_out_of(source.model)
    # a format without a place for modules of multi-token prediction
    if not has_module_rules(rules):
        source = source.without_mtp
    writer = _Writer(source, rules, dtype, shard_bytes)
    describe = {"to": "hf", "dtype": str(dtype), "shard": shard_bytes}
    return Target(
        describe=describe,
        size=writer.size,
        dtypes=writer.dtypes,
        reserve=writer.reserve,
        finish=writer.finish,
        reopen=open_hf,
        left_out=left_out,
    )


def left_out_of(model: ModelConfig) -> tuple[str, ...]:
    """Return what a Hugging Face folder leaves out of a model, in words. Raises UserError if no
    such folder computes what the model does."""
    modules: tuple[str, ...] = ()
    rules = HUGGING_FACE[model_type_of(model)]
    if not has_module_rules(rules):
        modules = _left_out_modules(model)
        model = model.without_mtp
    return (*omitted_settings(model), *modules)


class _Writer:
    """The files of one conversion. dtype: of the weights; None: their own."""

    def __init__(
        self, source: Source, rules: Sequence[NameRule], dtype: torch.dtype | None, shard_bytes: int
    ) -> None:
        self.source = source
        self.matches = matches(rules, source.model)
        # numbers beside the weights, by their match
        model_type = model_type_of(source.model)
        self.constants = dict(constants(source.model, model_type))
        # Modules of multi-token prediction have copies of embedding and head of their own.
        self.copies = [*module_copies(source.model), *self.constants]
        self.dtype_of: dict[Match, torch.dtype] = {}
        for match in (*self.matches, *self.copies):
            # logical tensors that are joined to one have the same dtype
            first_logical = match.logical[0]
            self.dtype_of[match] = source.dtype_in(f"weight/{first_logical}", dtype)
        # As transformers splits: in the order of the modules, no file above the limit.
        self.shards = _shards(self.dtype_of, shard_bytes)
        self.size = sum(_nbytes(match, dtype) for match, dtype in self.dtype_of.items())
        # By the keys of logical tensors.
        self.dtypes: dict[str, torch.dtype] = {}
        for match in self.matches:
            for tensor_name in match.logical:
                key = f"weight/{tensor_name}"
                self.dtypes[key] = self.dtype_of[match]

    def reserve(self, folder: Path, write: bool) -> list[Write]:
        """Make the shards; return a write for each tensor, with a location for each copy of it."""
        locations: dict[Match, Location] = {}
        for file, shard in self.shards.items():
            tensors = {match.foreign: (self.dtype_of[match], match.shape) for match in shard}
            starts = reserve_safetensors(folder / file, tensors, write)
            for match in shard:
                dtype = self.dtype_of[match]
                take = methodcaller("to", dtype)
                if match in self.constants:
                    number = self.constants[match]
                    take = bind(_constant, number, dtype)
                start = starts[match.foreign]
                locations[match] = Location(file, start, take)
        sizes = head_sizes(self.source.model)
        writes = []
        for match in self.matches:
            copies = [copy for copy in self.copies if copy.logical == match.logical]
            keys = tuple(f"weight/{tensor_name}" for tensor_name in match.logical)
            places = tuple(locations[copy] for copy in (match, *copies))
            tensor_write = Write(
                match.foreign,
                keys=keys,
                join=bind(match.join, sizes),
                locations=places,
                # Piece by piece only into one place: `convert` reads a piece once.
                straight=match.how is SAME and not copies,
            )
            writes.append(tensor_write)
        return writes

    def finish(self, folder: Path) -> None:
        """Write everything but tensors."""
        # That of the first: only corrections of routers may keep another.
        first_dtype = next(iter(self.dtype_of.values()))
        config = config_of(self.source.model, torch_name(first_dtype))
        special_ids = special_ids_of(self.source)
        _write_json(folder / CONFIG, config | special_ids)
        generation = self.source.facts.generation or special_ids
        write_generation(folder, generation)
        if len(self.shards) > 1:
            weight_map = {}  # the file of each tensor
            for file, shard in self.shards.items():
                weight_map |= {match.foreign: file for match in shard}
            index = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
            _write_json(folder / "model.safetensors.index.json", index)
        write_tokenizer(self.source.tokenizer, folder, special_ids["bos_token_id"])
        write_card(folder, self.source, first_dtype)


def _constant(value: float, dtype: torch.dtype, beside: torch.Tensor) -> torch.Tensor:
    """Return a number in place of the tensor that tells its dtype."""
    return torch.tensor(value, dtype=dtype)


def _nbytes(match: Match, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a file."""
    return prod(match.shape) * dtype.itemsize


def _shards(dtype_of: Mapping[Match, torch.dtype], shard_bytes: int) -> dict[str, list[Match]]:
    """Return file name -> tensors. No file is larger than `shard_bytes`, unless a single tensor
    is."""
    shard: list[Match] = []
    shards = [shard]
    free = shard_bytes
    for match, dtype in dtype_of.items():
        nbytes = _nbytes(match, dtype)
        if shard and nbytes > free:
            shard = []
            shards.append(shard)
            free = shard_bytes
        shard.append(match)
        free -= nbytes
    # One file needs no index.
    if len(shards) == 1:
        return {"model.safetensors": shard}
    files = {}
    count = len(shards)
    for number, shard in enumerate(shards, 1):
        files[f"model-{number:05d}-of-{count:05d}.safetensors"] = shard
    return files


def special_ids_of(source: Source) -> dict[str, Any]:
    """Return the ids of special tokens as a config.json has them: those of the source, or of its
    tokenizer."""
    # A run of ours has none of its own: its documents are told apart by the tokenizer's.
    ids = source.facts.special or tokenizer_ids(source)
    return {"bos_token_id": None, "eos_token_id": None, **ids}


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
    """Write a JSON file as transformers lays it out."""
    text = json.dumps(content, indent=2)
    put_text(path, text + "\n")


def write_generation(folder: Path, generation: Mapping[str, Any]) -> None:
    """Write a folder's generation_config.json."""
    _write_json(folder / GENERATION, generation)


def _left_out_modules(model: ModelConfig) -> tuple[str, ...]:
    """Return what is said of a model's modules where a format has no place for them."""
    if model.mtp_layers:
        return (f"modules of multi-token prediction (model.mtp_layers = {model.mtp_layers})",)
    return ()
