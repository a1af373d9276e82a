"""Reading what Colossal-AI's booster.save_model(..., shard=True) leaves: whole tensors in shards.

    pytorch_model.bin.index.json                    with its shards:
    pytorch_model-00001.bin                         without pipeline stages
    pytorch_model-stage-00001-shard-00001.bin       with them
    model.safetensors.index.json                    use_safetensors=True, with model-*.safetensors
    config.json                                     if the model is one of transformers'

Names and shapes are those of Hugging Face (colossalai/checkpoint_io/), so its reader reads the
folder. Colossal-AI's applications put it in modeling/, beside optimizer/ and lr_scheduler; the
optimizer's state is not read.
"""

import re
from pathlib import Path

from megaprec.errors import UserError
from tools.convert.core.source import Facts, Source
from tools.convert.hf.folder import CONFIG, has_weights, open_hf

MODELING = "modeling"
# others say of how many
SHARD = re.compile(r"(?:pytorch_model|model)-(?:stage-\d{5}-shard-)?\d{5}\.(?:bin|safetensors)")
STAGES = "tmp_index_files"  # indices of the stages, until they are put together
OPTIMIZER = re.compile(r"(?:pytorch_optim|optimizer)[-._].*(?:bin|safetensors|json)")


def find_colossalai(path: Path) -> Path | None:
    """Return the folder of the shards: `path`, or its modeling/."""
    folders = [folder for folder in (path, path / MODELING) if folder.is_dir()]
    for folder in folders:
        names = [file.name for file in folder.iterdir()]
        # shards of ours have such names, and no such index
        indexed = has_weights(folder) or STAGES in names
        if indexed and any(SHARD.fullmatch(name) for name in names):
            return folder
    return None


def open_colossalai(checkpoint: Path) -> Source:
    """Open the folder of the shards. UserError for what is missing, surplus or not known."""
    if (checkpoint / STAGES).is_dir():
        if has_weights(checkpoint):
            older = "the index beside it is of an earlier save"
        else:
            older = "no index is made of them"
        raise UserError.of(
            "convert.colossal_not_whole", path=checkpoint, stages=STAGES, older=older
        )
    if not (checkpoint / CONFIG).is_file():
        raise UserError.of("convert.colossal_config_missing", path=checkpoint / CONFIG)
    return open_hf(checkpoint, "colossalai", Facts(unread=_unread(checkpoint)))


def _unread(checkpoint: Path) -> str:
    """Return the files that are ignored: those beside the weights."""
    parent = checkpoint.parent if checkpoint.name == MODELING else checkpoint
    names = [file.name for file in (*checkpoint.iterdir(), *parent.iterdir())]
    unread = []
    if any(OPTIMIZER.fullmatch(name) for name in names) or (parent / "optimizer").exists():
        unread.append("the optimizer's state")
    for name in ("lr_scheduler", "running_states.json"):
        if (parent / name).exists():
            unread.append(name)
    return ", ".join(unread)
