"""Reading checkpoints of NxD (neuronx-distributed), and what its own converter makes of them.

    100/model/dp_rank_00_tp_rank_00_pp_rank_00.pt    a rank; 100/checkpoint marks the folder, 100/done that it is whole
    ..._pp_rank_00.pt.tensors/tensor_7.pt            with use_xser: tensors each in a file of its own
    tp_rank_00_pp_rank_00/checkpoint.pt              as older versions save it
    checkpoint.pt                                    what scripts/checkpoint_converter.py --convert_to_full_state makes

Tensors have the names that they have in Hugging Face, layers are numbered over all stages
(trainer/checkpoint.py). A checkpoint does not say what the model is: the Hugging Face config.json
that the model was made of has to be in its folder or in the one above. No pickle is opened in this
process (`tools.convert.core.untrusted`).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tools.convert.core.names import BUFFERS, HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import Reference, contents, state_in
from tools.convert.hf.config import from_hugging_face, special_ids
from tools.convert.hf.folder import (
    CONFIG,
    check_tensors,
    check_tied,
    has_weights,
    hf_tokenizer,
    origin_of,
    read_generation,
)
from tools.convert.hf.notes import notes
from tools.convert.hf.write_config import ARCHITECTURES
from tools.convert.megatron.ranks import notes_on_copies
from tools.convert.systems.nxd_tensors import hugging_face
from tools.convert.systems.shards import collect_shards

FILE = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
OLD = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")
EXPERTS = re.compile(r"dp_rank_\d+_ep_rank_\d+_tp_rank_\d+_pp_rank_\d+\.pt")
MERGED = "checkpoint.pt"
EXPORT = "NxD's scripts/checkpoint_converter.py --convert_to_full_state puts it together"
# Keys that NxD's own models add to config.json: how layers are cut, fused and computed, which is
# seen from the tensors.
OWN_KEYS = {
    "fuse_qkv",
    "kv_shared_group_size",
    "move_model_to_device",
    "qkv_linear",
    "selective_checkpoint_enabled",
    "separate_qkv",
    "sequence_parallel_enabled",
    "transpose_nki_inputs",
    "use_flash_attention",
}


def find_nxd(path: Path) -> Path | None:
    """The checkpoint's folder: `path`, the one above if it is a `model` folder, or the only whole
    one in it."""
    if path.name == "model" and _has_ranks(path):
        return path.parent
    # beside Hugging Face's weights it is some other file
    merged = (path / MERGED).is_file() and not has_weights(path)
    if merged or _has_ranks(path / "model") or _has_ranks(path):
        return path
    tags = [
        tag
        for tag in sorted(path.iterdir())
        if (tag / "checkpoint").is_file() and _has_ranks(tag / "model")
    ]
    whole = [tag for tag in tags if (tag / "done").is_file()]
    if len(whole) > 1:
        names = ", ".join(tag.name for tag in whole)
        raise UserError(f"{path} has several checkpoints of NxD: give the folder of one of {names}")
    return next(iter(whole or tags), None)


def _has_ranks(folder: Path) -> bool:
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return any(kind.fullmatch(name) for kind in (FILE, OLD, EXPERTS) for name in names)


def open_nxd(path: Path) -> Source:
    """Opens a checkpoint's folder. UserError for what is missing, surplus or not known."""
    if (path / "checkpoint").is_file() and not (path / "done").is_file():
        raise UserError(
            f"{path} was not saved whole: NxD writes {path / 'done'} last, and it is missing"
        )
    file, config = _config(path)
    model, kind = _described(file, config)
    files = _files(path)
    held, beside = _tensors(path, files)
    tp, pp = (1 + max(rank[axis] for rank in held) for axis in range(2))
    by_name = collect_shards(path, [(lambda _, t=t: (t, tp), own) for (t, _), own in held.items()])
    weights = hugging_face(path, by_name, model)
    found = matches(HUGGING_FACE[kind], model)
    check_tied(path, model, weights, found)
    check_tensors(path, found, weights)
    origins = [
        origin_of(m, weights[m.foreign].read, weights[m.foreign].dtype, model) for m in found
    ]
    facts = Facts(
        layout={"tensor": tp, "pipeline": pp},
        unread=_unread(path, beside),
        special=special_ids(config),
        generation=read_generation(file.parent),
        notes=(
            *(f"{file}: {note}" for note in notes(config, ARCHITECTURES[kind], False)),
            *notes_on_copies(path, {rank: [own] for rank, own in held.items()}),
        ),
    )
    return Source(
        path, "nxd", model, origins, facts, hf_tokenizer(path) or hf_tokenizer(file.parent)
    )


def _config(path: Path) -> tuple[Path, dict[str, Any]]:
    """The config.json of the model, and what it says but for NxD's own keys."""
    file = next(
        (folder / CONFIG for folder in (path, path.parent) if (folder / CONFIG).is_file()), None
    )
    if file is None:
        raise UserError(
            f"{path / CONFIG} is missing: an NxD checkpoint does not say what the model is; "
            "put the Hugging Face "
            "config.json there that the model was made of"
        )
    return file, {key: value for key, value in read_json(file).items() if key not in OWN_KEYS}


def _described(file: Path, config: dict[str, Any]) -> tuple[ModelConfig, str]:
    """The model of config.json, and its family there."""
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{file} has quantization_config, which NxD's checkpoints do not go by: take it out"
        )
    try:
        return from_hugging_face(config).alone, config["model_type"]
    except UserError as error:
        raise UserError(*(f"{file}: {problem}" for problem in error.problems)) from error


def _files(path: Path) -> dict[tuple[int, int], Path]:
    """(tp, pp) -> the file of the rank. UserError if one is missing."""
    folder = path / "model" if _has_ranks(path / "model") else path
    if folder == path and not _has_ranks(path):
        return {(0, 0): path / MERGED}
    if (path / MERGED).is_file():
        raise UserError(f"{path} has files of ranks and {MERGED}: leave in it what is meant")
    names = sorted(file.name for file in folder.iterdir())
    if experts := [name for name in names if EXPERTS.fullmatch(name)]:
        raise UserError(
            f"{folder / experts[0]} holds experts of a rank, which cannot be read here: {EXPORT}"
        )
    new = _by_rank(
        folder,
        {name: m.groups()[1:] for name in names if (m := FILE.fullmatch(name)) and not int(m[1])},
    )
    old = _by_rank(folder, {name: m.groups() for name in names if (m := OLD.fullmatch(name))})
    if new and old:
        raise UserError(f"{folder} has files of two versions of NxD: leave in it what is meant")
    found = new or {rank: at / MERGED if at.is_dir() else at for rank, at in old.items()}
    tp, pp = (1 + max(rank[axis] for rank in [*found, *_of_optimizer(path)]) for axis in range(2))
    for t, p in product(range(tp), range(pp)):
        dp = "" if old else "dp_rank_00_"
        expected = found.get(
            (t, p), folder / f"{dp}tp_rank_{t:02d}_pp_rank_{p:02d}{'' if old else '.pt'}"
        )
        if not expected.is_file():
            raise UserError(f"{expected} is missing")
    return found


def _by_rank(folder: Path, named: Mapping[str, Sequence[str]]) -> dict[tuple[int, int], Path]:
    """(tp, pp) -> its file. UserError if two are of one rank."""
    found: dict[tuple[int, int], Path] = {}
    for name, (tensor, pipeline) in named.items():
        if other := found.get(_rank(tensor, pipeline)):
            raise UserError(f"{folder / name} and {other.name} are both of one rank: move one away")
        found[_rank(tensor, pipeline)] = folder / name
    return found


def _rank(tensor: str, pipeline: str) -> tuple[int, int]:
    return int(tensor), int(pipeline)


def _of_optimizer(path: Path) -> list[tuple[int, int]]:
    """(tp, pp) of the files beside the model's, which tell how many ranks there were."""
    names = [file.name for file in (path / "optim").iterdir()] if (path / "optim").is_dir() else []
    return [_rank(match[2], match[3]) for name in names if (match := FILE.fullmatch(name))]


def _tensors(
    path: Path, files: Mapping[tuple[int, int], Path]
) -> tuple[dict[tuple[int, int], dict[str, Stored]], list[str]]:
    """(tp, pp) -> the rank's tensors by name; and what the files hold besides."""
    held: dict[tuple[int, int], dict[str, Stored]] = {}
    beside: set[str] = set()
    for (rank, file), content in zip(files.items(), contents(list(files.values())), strict=True):
        if not isinstance(content, dict):
            raise UserError(f"{file} does not hold a dict of tensors")
        state = content
        if isinstance(content.get("model"), dict):
            state = content["model"]
            beside |= {str(key) for key in content if key != "model"}
        held[rank] = {
            name: value
            for name, value in _stored(file, state).items()
            if not name.endswith(BUFFERS)
        }
    return held, sorted(beside)


def _stored(file: Path, state: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a file, those included that lie in files of their own."""
    state = state_in(file, state, with_references=True)
    with_references = {name: value for name, value in state.items() if isinstance(value, Reference)}
    at = {
        name: file.with_name(f"{file.name}.tensors") / f"tensor_{one.number}.pt"
        for name, one in with_references.items()
    }
    if lost := next((one for one in at.values() if not one.is_file()), None):
        raise UserError(
            f"{lost} is missing; a checkpoint saved with avoid_saving_lower_precision_weights "
            "has its weights in the "
            "optimizer's state alone, which is not read: have NxD save it without"
        )
    found = dict(zip(at, contents(list(at.values())), strict=True)) if at else {}
    return state_in(file, {**state, **found})


def _unread(path: Path, beside: Sequence[str]) -> str:
    """Return the files that are ignored: those beside the weights."""
    optimizer = ["the optimizer's state (optim/)"] if (path / "optim").is_dir() else []
    others = [name for name in ("scheduler.pt", "user_content.pt") if (path / name).is_file()]
    return ", ".join([*optimizer, *others, *beside])
