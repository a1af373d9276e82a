"""Reading checkpoints of NxD (neuronx-distributed), and what its own converter makes of them.

    100/checkpoint, 100/done                       mark the folder, and that it is whole
    100/model/dp_rank_00_tp_rank_00_pp_rank_00.pt  a rank
    ..._pp_rank_00.pt.tensors/tensor_7.pt          with use_xser: tensors each in a file of its own
    tp_rank_00_pp_rank_00/checkpoint.pt            as older versions save it
    checkpoint.pt                                  what NxD's converter makes of the ranks' files
                                                   (--convert_to_full_state)

Tensors have the names that they have in Hugging Face, layers are numbered over all stages
(trainer/checkpoint.py). A checkpoint does not say what the model is: the Hugging Face config.json
that the model was made of has to be in its folder or in the one above. No pickle is opened in this
process (`tools.convert.core.untrusted`).
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tools.convert.core.names import BUFFERS, HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import Reference, contents, state_in
from tools.convert.hf.config import from_hugging_face, special_ids
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.folder import (
    CONFIG,
    check_tensors,
    check_tied,
    has_weights,
    hf_tokenizer,
    origins_of,
    read_generation,
)
from tools.convert.hf.notes import notes
from tools.convert.megatron.ranks import notes_on_copies
from tools.convert.systems.nxd_tensors import hugging_face
from tools.convert.systems.shards import Part, collect_shards

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


class ModelRank(NamedTuple):
    """The numbers of a rank along tensor and pipeline parallelism."""

    tp: int
    pp: int


def find_nxd(path: Path) -> Path | None:
    """Return the checkpoint's folder: `path`, the one above if it is a `model` folder, or the only
    whole one in it."""
    if path.name == "model" and _has_ranks(path):
        return path.parent
    # beside Hugging Face's weights it is some other file
    merged = (path / MERGED).is_file() and not has_weights(path)
    if merged or _has_ranks(path / "model") or _has_ranks(path):
        return path
    # The folder of a run, with a folder for each checkpoint.
    tags = [
        tag
        for tag in sorted(path.iterdir())
        if (tag / "checkpoint").is_file() and _has_ranks(tag / "model")
    ]
    complete = [tag for tag in tags if (tag / "done").is_file()]
    if len(complete) > 1:
        names = ", ".join(tag.name for tag in complete)
        raise UserError.of("convert.nxd_several", path=path, names=names)
    return next(iter(complete or tags), None)


def _has_ranks(folder: Path) -> bool:
    """Return True if a folder has files of ranks."""
    if not folder.is_dir():
        return False
    names = [file.name for file in folder.iterdir()]
    return any(kind.fullmatch(name) for kind, name in product((FILE, OLD, EXPERTS), names))


def open_nxd(path: Path) -> Source:
    """Open a checkpoint's folder. UserError for what is missing, surplus or not known."""
    if (path / "checkpoint").is_file() and not (path / "done").is_file():
        raise UserError.of("convert.nxd_not_whole", path=path, last_file=path / "done")
    file, config = _read_config(path)
    model, kind = _model_of(file, config)
    files = _find_files(path)
    tensors, unread_keys = _read_tensors(files)
    tp = 1 + max(rank.tp for rank in tensors)
    pp = 1 + max(rank.pp for rank in tensors)
    ranks = [(partial(_part_of, rank, tp), of_rank) for rank, of_rank in tensors.items()]
    weights = hugging_face(path, collect_shards(path, ranks), model)
    expected = matches(HUGGING_FACE[kind], model)
    check_tied(path, model, weights, expected)
    check_tensors(path, expected, weights)
    chunks = {rank: [of_rank] for rank, of_rank in tensors.items()}
    facts = Facts(
        layout={"tensor": tp, "pipeline": pp},
        unread=_unread(path, unread_keys),
        special=special_ids(config),
        generation=read_generation(file.parent),
        notes=(
            *(f"{file}: {note}" for note in notes(config, FAMILIES[kind].architecture, False)),
            *notes_on_copies(path, chunks),
        ),
    )
    origins = origins_of(expected, weights, model)
    tokenizer = hf_tokenizer(path) or hf_tokenizer(file.parent)
    return Source(path, "nxd", model, origins, facts, tokenizer)


def _part_of(rank: ModelRank, tp: int, name: str) -> Part:
    """Return which part of any tensor a rank has. tp: tensor-parallel ranks."""
    return Part(rank.tp, tp)


def _read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the config.json of the model, and what it says but for NxD's own keys."""
    for file in (path / CONFIG, path.parent / CONFIG):
        if file.is_file():
            config = read_json(file)
            return file, {key: value for key, value in config.items() if key not in OWN_KEYS}
    raise UserError.of("convert.nxd_config_missing", path=path / CONFIG)


def _model_of(file: Path, config: dict[str, Any]) -> tuple[ModelConfig, str]:
    """Return the model of config.json, and its family there."""
    if config.get("quantization_config") is not None:
        raise UserError.of("convert.nxd_quantized", file=file)
    try:
        return from_hugging_face(config).alone, config["model_type"]
    except UserError as error:
        raise UserError(*(problem.within(f"{file}: ") for problem in error.problems)) from error


def _find_files(path: Path) -> dict[ModelRank, Path]:
    """Return the file of each rank. UserError if one is missing."""
    folder = path / "model" if _has_ranks(path / "model") else path
    if folder == path and not _has_ranks(path):
        return {ModelRank(0, 0): path / MERGED}
    if (path / MERGED).is_file():
        raise UserError.of("convert.nxd_two_kinds", path=path, merged=MERGED)
    names = sorted(file.name for file in folder.iterdir())
    _refuse_experts(folder, names)
    new = _new_files(folder, names)
    old = _old_files(folder, names)
    if new and old:
        raise UserError.of("convert.nxd_versions", folder=folder)
    files = new or old
    _require_all_ranks(folder, files, _ranks_of_optimizer(path), bool(old))
    return files


def _require_all_ranks(
    folder: Path, files: Mapping[ModelRank, Path], others: Sequence[ModelRank], old: bool
) -> None:
    """Raise UserError if a rank has no file.

    others: ranks that other files tell of.
    old: files have the names of older versions.
    """
    ranks = [*files, *others]
    tp_size = 1 + max(rank.tp for rank in ranks)
    pp_size = 1 + max(rank.pp for rank in ranks)
    for tp, pp in product(range(tp_size), range(pp_size)):
        name = f"tp_rank_{tp:02d}_pp_rank_{pp:02d}"
        usual = folder / (name if old else f"dp_rank_00_{name}.pt")
        file = files.get(ModelRank(tp, pp), usual)
        if not file.is_file():
            raise UserError.of("convert.megatron_folder_missing", file=file)


def _refuse_experts(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError for a file with the experts of a rank."""
    for name in names:
        if EXPERTS.fullmatch(name):
            raise UserError.of("convert.nxd_experts", folder=folder / name, export=EXPORT)


def _new_files(folder: Path, names: Sequence[str]) -> dict[ModelRank, Path]:
    """Return the files of the first data-parallel rank, which have the others' values."""
    numbers = {}
    for name in names:
        match = FILE.fullmatch(name)
        if match and int(match[1]) == 0:
            numbers[name] = match[2], match[3]
    return _by_rank(folder, numbers)


def _old_files(folder: Path, names: Sequence[str]) -> dict[ModelRank, Path]:
    """Return the files of ranks as older versions save them, mostly each in a folder of its own."""
    numbers = {}
    for name in names:
        if match := OLD.fullmatch(name):
            numbers[name] = match[1], match[2]
    files = {}
    for rank, file in _by_rank(folder, numbers).items():
        files[rank] = file / MERGED if file.is_dir() else file
    return files


def _by_rank(folder: Path, numbers: Mapping[str, tuple[str, str]]) -> dict[ModelRank, Path]:
    """Return the file of each rank. numbers: of a file's name, those of tp and pp. UserError if two
    are of one rank."""
    files: dict[ModelRank, Path] = {}
    for name, (tensor, pipeline) in numbers.items():
        rank = ModelRank(int(tensor), int(pipeline))
        if rank in files:
            raise UserError.of(
                "convert.internevo_rank_twice", path=folder / name, names=files[rank].name
            )
        files[rank] = folder / name
    return files


def _ranks_of_optimizer(path: Path) -> list[ModelRank]:
    """Return the ranks of the files beside the model's, which tell how many ranks there were."""
    folder = path / "optim"
    if not folder.is_dir():
        return []
    matches = [FILE.fullmatch(file.name) for file in folder.iterdir()]
    return [ModelRank(int(match[2]), int(match[3])) for match in matches if match]


def _read_tensors(
    files: Mapping[ModelRank, Path],
) -> tuple[dict[ModelRank, dict[str, Stored]], list[str]]:
    """Return the tensors of each rank by name; and the keys of what the files hold besides."""
    tensors: dict[ModelRank, dict[str, Stored]] = {}
    unread_keys: set[str] = set()
    for (rank, file), content in zip(files.items(), contents(list(files.values())), strict=True):
        if not isinstance(content, dict):
            raise UserError.of("convert.not_a_state", file=file)
        state = content
        # Older versions and the converter have a dict around the state.
        if isinstance(content.get("model"), dict):
            state = content["model"]
            unread_keys |= {str(key) for key in content if key != "model"}
        tensors[rank] = {
            name: value
            for name, value in _resolve(file, state).items()
            if not name.endswith(BUFFERS)
        }
    return tensors, sorted(unread_keys)


def _resolve(file: Path, state: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a file, those included that lie in files of their own."""
    state = state_in(file, state, with_references=True)
    folder = file.with_name(f"{file.name}.tensors")
    files = {
        name: folder / f"tensor_{value.number}.pt"
        for name, value in state.items()
        if isinstance(value, Reference)
    }
    for tensor_file in files.values():
        if not tensor_file.is_file():
            raise UserError.of("convert.nxd_file_missing", tensor_file=tensor_file)
    resolved = dict(state)
    if files:
        resolved.update(zip(files, contents(list(files.values())), strict=True))
    return state_in(file, resolved)


def _unread(path: Path, unread_keys: Sequence[str]) -> str:
    """Return the files that are ignored: those beside the weights."""
    unread = ["the optimizer's state (optim/)"] if (path / "optim").is_dir() else []
    unread += [name for name in ("scheduler.pt", "user_content.pt") if (path / name).is_file()]
    return ", ".join([*unread, *unread_keys])
