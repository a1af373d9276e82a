"""Recognizing the format of a folder, and opening it.

Every reader looks for its own files. A folder that two readers recognize is refused, for it is
ambiguous.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.tokens.places import is_remote
from models.config import ModelConfig
from tools.convert.core.source import Source
from tools.convert.hf.folder import find_hf, has_weights, open_hf
from tools.convert.hf.other_files import require_fetched, require_no_adapter
from tools.convert.megatron.read import find_megatron, open_megatron
from tools.convert.native import open_native
from tools.convert.systems.colossalai import find_colossalai, open_colossalai
from tools.convert.systems.dcp import find_dcp, open_dcp
from tools.convert.systems.internevo import find_internevo, open_internevo
from tools.convert.systems.nemo import find_nemo, open_nemo, refuse_older
from tools.convert.systems.nxd import find_nxd, open_nxd


@dataclass(frozen=True)
class CheckpointFormat:
    """A format that can be read.

    find: returns the checkpoint's folder if a folder has the format.
    marks: files that show it.
    """

    name: str
    find: Callable[[Path], Path | None]
    open: Callable[[Path], Source]
    marks: str


FORMATS = {
    "megaprec": CheckpointFormat("megaprec", checkpoint_at, open_native, "checkpoint.json"),
    "hf": CheckpointFormat("Hugging Face", find_hf, open_hf, "config.json"),
    "megatron": CheckpointFormat(
        "Megatron-LM",
        find_megatron,
        open_megatron,
        "latest_checkpointed_iteration.txt, mp_rank_00/ or metadata.json with .metadata",
    ),
    "colossalai": CheckpointFormat(
        "Colossal-AI", find_colossalai, open_colossalai, "pytorch_model-00001.bin and its index"
    ),
    "dcp": CheckpointFormat(
        "PyTorch's distributed checkpoints", find_dcp, open_dcp, ".metadata and __0_0.distcp"
    ),
    "internevo": CheckpointFormat("InternEvo", find_internevo, open_internevo, "model_tp0_pp0.pt"),
    "nemo": CheckpointFormat("NeMo", find_nemo, open_nemo, "weights/ and context/"),
    "nxd": CheckpointFormat(
        "NxD", find_nxd, open_nxd, "model/dp_rank_00_tp_rank_00_pp_rank_00.pt or checkpoint.pt"
    ),
}
MOST_INSIDE = 100  # folders of a folder that are looked into, to name those that may be meant
MOST_NAMED = 3  # of these that are named
# the formats that may leave the vocabulary's size without padding unsaid
WITH_VOCAB = ("megatron", "nemo")
WITH_CONFIG = ("hf", "colossalai")  # the formats whose config.json is one of transformers
TARGETS = ("hf", "megaprec", "megatron")  # the formats that are written


def open_intact(
    folder: Path,
    vocab: int | None = None,
    weights_only: bool = False,
    model: ModelConfig | None = None,
) -> Source:
    """Open a model as `open_source` does. Raises UserError also if a file of a megaprec checkpoint
    is damaged."""
    if checkpoint := checkpoint_at(folder):
        store = Store(checkpoint)
        require_intact(store, store.digests)
    return open_source(folder, vocab, weights_only, model)


def open_source(
    path: Path,
    vocab: int | None = None,
    weights_only: bool = False,
    model: ModelConfig | None = None,
) -> Source:
    """Open a folder of any format.

    vocab: vocabulary size without padding, if a Megatron or NeMo checkpoint does not state it.
    weights_only: ignore the optimizer state of a Megatron checkpoint; UserError for other formats.
    model: that of a distributed checkpoint that does not say it; UserError for others.
    """
    kind, folder = format_of(path)
    if kind == "megatron":
        return open_megatron(folder, vocab, weights_only, model)
    if weights_only:
        raise UserError.of("convert.weights_only_unused", path=path)
    if kind == "dcp":
        return open_dcp(folder, model)
    if model is not None:
        raise UserError.of("convert.config_unused", path=path)
    if kind == "nemo":
        return open_nemo(folder, vocab)
    return FORMATS[kind].open(folder)


def check_vocab(vocab: int | None, *paths: Path) -> None:
    """Raise UserError for a --vocab below 1, or that none of the folders has a use for."""
    if vocab is None:
        return
    if vocab < 1:
        raise UserError.of("convert.vocab_option", vocab=vocab)
    if not any(format_of(folder)[0] in WITH_VOCAB for folder in paths):
        formats = " and ".join(FORMATS[kind].name for kind in WITH_VOCAB)
        raise UserError.of(
            "convert.vocab_unused",
            formats=formats,
            given=" and ".join(map(str, paths)),
            verb="are" if len(paths) > 1 else "is",
        )


def format_of(path: Path) -> tuple[str, Path]:
    """Return the format of a folder and the folder of the checkpoint. Raises UserError for none and
    for several. At a URL only checkpoints of ours are read."""
    if is_remote(path):
        checkpoint = checkpoint_at(path)
        if checkpoint is None:
            raise UserError.of("convert.url_without_checkpoint", url=path)
        return "megaprec", checkpoint
    if not path.is_dir():
        refuse_older(path)
        raise UserError.of(
            "convert.not_a_folder",
            path=path,
            what_it_is="no folder" if path.exists() else "not there",
        )
    require_fetched(path)
    folders = _recognize(path)
    # Also if nothing was recognized. NeMo 1 names its folders as these systems do.
    if folders.keys() <= {"megatron", "dcp"}:
        refuse_older(path, holds_others=bool(folders))
    if "megaprec" not in folders:
        for folder in {path, *folders.values()}:
            require_no_adapter(folder)
    if len(folders) > 1:
        names = " and of ".join(FORMATS[kind].name for kind in folders)
        raise UserError.of("convert.several_formats", path=path, names=names)
    if not folders:
        hint = _hint_inside(path) or f": {_all_marks()}"
        raise UserError.of("convert.format_unknown", path=path, hint=hint)
    return next(iter(folders.items()))


def _recognize(path: Path) -> dict[str, Path]:
    """Return the formats whose files a folder has, each with the folder of the checkpoint."""
    folders: dict[str, Path] = {}
    for kind, known_format in FORMATS.items():
        if folder := known_format.find(path):
            folders[kind] = folder
    if "colossalai" in folders:
        folders.pop("hf", None)  # whose format it is
    if "nemo" in folders:
        # In whose formats NeMo keeps its weights.
        folders.pop("megatron", None)
        folders.pop("dcp", None)
    # config.json is what says of these checkpoints what the model is.
    if folders.keys() & {"nxd", "dcp"} and not has_weights(path):
        folders.pop("hf", None)
    return folders


def _all_marks() -> str:
    """Return what files each format has."""
    return "; ".join(
        f"{known_format.name} has {known_format.marks}" for known_format in FORMATS.values()
    )


def _hint_inside(path: Path) -> str:
    """Return what to say of a folder's folders that have a known format; "" if none has."""
    names: list[str] = []
    for folder in sorted(path.iterdir())[:MOST_INSIDE]:
        if not folder.is_dir():
            continue
        if any(_has_format(folder, known_format) for known_format in FORMATS.values()):
            names.append(folder.name)
    if not names:
        return ""
    verb = " has"
    if len(names) > MOST_NAMED:
        verb = " and others have"
    elif len(names) > 1:
        verb = " have"
    return f", but its {', '.join(names[:MOST_NAMED])}{verb} one: give that"


def _has_format(folder: Path, known_format: CheckpointFormat) -> bool:
    try:
        return known_format.find(folder) is not None
    except (UserError, OSError):
        return False
