"""Reading NeMo 2's checkpoints: a folder of two, weights/ and context/.

    weights/    a distributed checkpoint of Megatron-core's (torch_dist), every tensor's name with
                `module.` before it (the first versions have its files in the folder itself)
    context/    model.yaml, which says what the model is; io.json, the tokenizer's files

(nemo/lightning/ckpt_utils.py, nemo/lightning/io/pl.py, nemo/lightning/megatron_parallel.py.)
Weights are read, the optimizer's state is not. YAML is read by a loader that makes plain values
only; no pickle is opened in this process (`tools.convert.core.untrusted`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import read_text
from models.config import ModelConfig
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, matches
from tools.convert.core.source import Facts, Source
from tools.convert.hf.beside import require_fetched
from tools.convert.hf.folder import hf_tokenizer, origins_of
from tools.convert.megatron.distributed import Chunked, Contents, merge_chunks, read_chunked
from tools.convert.megatron.order import EMBEDDING
from tools.convert.systems.nemo_model import model_of

WEIGHTS = "weights"
CONTEXT = "context"
MODEL = "model.yaml"
TOKENIZER = "nemo_tokenizer"
# of an unpacked .nemo
OLDER = "model_config.yaml"
OLDER_PARTS = ("model_weights", "mp_rank_", "tp_rank_")
PREFIX = "module."
# Ends the name of a file beside the folder, as long as it is being saved.
UNFINISHED = "-unfinished"
ADAPTER = "adapter_metadata.json"
EXPORT = "NeMo's llm.export_ckpt(path, target='hf') makes a Hugging Face folder of it"


def find_nemo(path: Path) -> Path | None:
    """Return the checkpoint's folder: `path`, or the one above, if it is its `weights`."""
    for folder in (path, path.parent) if path.name == WEIGHTS else (path,):
        has_weights = (folder / WEIGHTS).is_dir() or (folder / ".metadata").is_file()
        if has_weights and (folder / CONTEXT).is_dir():
            return folder
    return None


def refuse_older(path: Path, holds_others: bool = False) -> None:
    """Raise UserError if a path is an archive of NeMo 1 (.nemo), the folder that it unpacks to, or
    a folder of one.

    holds_others: the folder has another format, beside which an archive is some other file.
    """
    folders = (path, path.parent) if path.name.startswith(OLDER_PARTS) else (path,)
    older = [folder / OLDER for folder in folders if (folder / OLDER).is_file()]
    if not holds_others:
        if path.is_dir():
            older += sorted(path.glob("*.nemo"))
        elif path.suffix == ".nemo":
            older.append(path)
    if older:
        raise UserError.of("convert.nemo1", older=older[0])


def open_nemo(path: Path, vocab: int | None = None) -> Source:
    """Open a checkpoint's folder. UserError for what is missing, surplus or not known.

    vocab: tokens without padding; None: what model.yaml says.
    """
    file = path / CONTEXT / MODEL
    folder = path / WEIGHTS if (path / WEIGHTS).is_dir() else path
    _check_complete(path, folder)
    if not (folder / ".metadata").is_file():
        raise UserError.of(
            "convert.nemo_not_distributed", folder=folder / ".metadata", export=EXPORT
        )
    config = read_yaml(file).get("config")
    if not isinstance(config, dict):
        raise UserError.of("convert.nemo_no_config", file=file, export=EXPORT)
    model = model_of(config, vocab, str(file))
    contents = read_chunked(folder)
    tensors = _with_megatron_names(folder, contents)
    _check_rows(folder, tensors, config["vocab_size"])
    expected = _expected(tensors, model, bool(config["rotary_interleaved"]))
    weights = merge_chunks(folder, expected, tensors, model)
    layout = {}
    for axis in ("tensor", "pipeline"):
        ranks = config.get(f"{axis}_model_parallel_size")
        if isinstance(ranks, int):
            layout[axis] = ranks
    notes = tuple(_notes_on_padding(config, model.vocab, tensors))
    facts = Facts(layout=layout, unread=_unread(folder, contents), notes=notes)
    tokenizer = hf_tokenizer(path / CONTEXT / TOKENIZER) or hf_tokenizer(path / CONTEXT)
    origins = origins_of(expected, weights, model)
    return Source(path, "nemo", model, origins, facts, tokenizer)


def _check_complete(path: Path, folder: Path) -> None:
    """Raise UserError if the checkpoint was not saved or fetched whole, or holds an adapter
    alone."""
    mark = path.absolute().with_name(f"{path.absolute().name}{UNFINISHED}")
    if mark.exists():
        raise UserError.of("convert.nemo_not_whole", path=path, mark=mark)
    # A pointer of Git LFS in place of a file would be taken for a damaged one.
    for part in (folder, path / CONTEXT):
        require_fetched(part)
    if (folder / ADAPTER).is_file():
        raise UserError.of("convert.nemo_adapter", folder=folder / ADAPTER)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return a YAML mapping. UserError if the file is not there or holds something else, or if
    nothing here reads YAML."""
    try:
        import yaml  # noqa: PLC0415 (optional)  # pyright: ignore[reportMissingModuleSource]
    except ImportError as problem:
        raise UserError.of("convert.pyyaml_missing", file=file) from problem

    class Once(yaml.SafeLoader):
        """A loader of plain values that refuses a key that a mapping has twice."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set[tuple[str, str]]()
            for key, _ in node.value:  # as they are written: merged ones (<<) may be given again
                identity = key.tag, str(key.value)
                if identity in seen:
                    raise ValueError(
                        f"line {key.start_mark.line + 1}: {key.value} is given twice; keep "
                        "one of them"
                    )
                seen.add(identity)
            return node

    # What YAML 1.2 and all other languages take for a number, PyYAML takes for text.
    Once.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), [*"-+0123456789"]
    )
    try:
        content = yaml.load(read_text(file), Once)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError.of(
            "convert.yaml_unreadable", file=file, split=" ".join(str(error).split())
        ) from error
    if not isinstance(content, dict):
        raise UserError.of("convert.yaml_not_mapping", file=file)
    return content


def _with_megatron_names(folder: Path, contents: Contents) -> dict[str, Chunked]:
    """Return the weights by Megatron-core's names."""
    tensors: dict[str, Chunked] = {}
    for name, tensor in contents.by_kind["weight"].items():
        if not name.startswith(PREFIX):
            raise UserError.of(
                "convert.nemo_name", folder=folder, name=name, prefix=PREFIX, export=EXPORT
            )
        megatron_name = name.removeprefix(PREFIX)
        tensors[megatron_name] = replace(tensor, name=megatron_name)
    return tensors


def _check_rows(folder: Path, tensors: Mapping[str, Chunked], vocab: int | None) -> None:
    """Raise UserError if the embedding has not as many rows as model.yaml says. Without its word
    NeMo pads."""
    embedding = tensors.get(EMBEDDING)
    if vocab and embedding and embedding.shape[0] != vocab:
        raise UserError.of(
            "convert.nemo_vocab", folder=folder, shape=embedding.shape[0], model=MODEL, vocab=vocab
        )


def _notes_on_padding(
    config: Mapping[str, Any], vocab: int, tensors: Mapping[str, Chunked]
) -> Iterator[str]:
    """Yield a note if NeMo would have padded a vocabulary of --vocab N to another number of
    rows."""
    divisor = config.get("make_vocab_size_divisible_by")
    tp = config.get("tensor_model_parallel_size")
    if not isinstance(divisor, int) or not isinstance(tp, int) or divisor * tp < 1:
        return
    if config["vocab_size"] is not None or EMBEDDING not in tensors:
        return
    rows = tensors[EMBEDDING].shape[0]
    padded = -(-vocab // (divisor * tp)) * divisor * tp
    if rows != padded:
        yield (
            f"--vocab {vocab} is {padded} rows with NeMo's padding "
            f"(make_vocab_size_divisible_by = {divisor}, "
            f"tensor_model_parallel_size = {tp}), but the embedding has {rows}: the first "
            f"{vocab} were read"
        )


def _expected(names: Mapping[str, Any], model: ModelConfig, interleaved: bool) -> list[Match]:
    """Return the tensors that the model has, by the names that these have."""
    fused = any(".linear_qkv.layer_norm_" in name for name in names)
    return matches(megatron(fused, interleaved, model), model)


def _unread(folder: Path, contents: Contents) -> str:
    """Return the files that are ignored: those beside the weights."""
    unread = []
    if contents.flat or any(kind != "weight" for kind in contents.by_kind):
        unread.append("the optimizer's state")
    if (folder / "common.pt").is_file():
        unread.append("common.pt")
    return ", ".join(unread)
