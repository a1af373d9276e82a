"""The Hugging Face folder of each checkpoint that a run keeps (checkpoint.export = "hf").

It lies in the checkpoint, so that both go together. It is written from the checkpoint's own files,
when these are there: by the thread of rank 0 that has saved them, beside the next steps. It gets
its name when it is whole. What a kill or a full disk has interrupted is written anew after the next
save, or at the end of the run.

At a URL nothing can be renamed: the folder is written on this machine and sent, config.json last.
Without that file no program takes it for a model.
"""

import shutil
from pathlib import Path

from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.keeping import made_here
from megaprec.checkpoint.object_store import is_object, send
from megaprec.checkpoint.reader import Store
from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.optim.state.flat_buffer import EMA
from megaprec.scratch import scratch_folder
from megaprec.tokens.places import is_remote
from models.config import require_builtin
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.convert.averaged import averaged
from tools.convert.core.target import convert
from tools.convert.hf.folder import CONFIG
from tools.convert.hf.vocabulary import require_writable
from tools.convert.hf.write import hf_target, left_out_of
from tools.convert.native import open_native
from tools.saved.train_state import read_table, tokenizer_files
from tools.training.corpus import Corpus
from tools.training.saves import tokenizer_files as files_of_tokenizer

EXPORTED = "hf"  # folder in a checkpoint
KEY = "checkpoint.export"
AVERAGE_KEY = "checkpoint.export_ema"


def require_exportable(config: RunConfig) -> None:
    """Raise UserError for a run whose checkpoints are exported, but whose model no Hugging Face
    folder can hold."""
    require_builtin(config.model, f"{KEY} = {toml(config.checkpoint.export)}")
    if config.checkpoint.export_ema and not config.optimizer.ema:
        raise UserError.of("command.export_key_no_ema")
    left_out_of(config.sized_model)


def export_note(config: RunConfig) -> str:
    """Return a note on what of the model the folders leave out; "" if they have all of it."""
    left_out = left_out_of(config.sized_model)
    if not left_out:
        return ""
    return f"{KEY} = {toml(config.checkpoint.export)} leaves out: {', '.join(left_out)}"


def require_exportable_tokenizer(corpus: Corpus) -> None:
    """Raise UserError for a tokenizer that a Hugging Face folder cannot hold."""
    require_writable(files_of_tokenizer(corpus))


def export_kept(folder: Path) -> list[str]:
    """Write the Hugging Face folder of each checkpoint in `folder` that saves have made for a run
    with checkpoint.export, and that has none yet.

    Returns a warning for each that cannot be written.
    """
    try:
        checkpoints = made_here(folder)
    except UserError as error:  # a server that is gone ends no run
        return list(error.problems)
    warnings: list[str] = []
    for path in checkpoints:
        try:
            if not _is_exported(path):
                _export(path)
        except (UserError, OSError) as error:
            # it may be what has filled the disk
            if not is_remote(path):
                shutil.rmtree(path / f".{EXPORTED}.partial", ignore_errors=True)
            problems = error.problems if isinstance(error, UserError) else [file_error(error)]
            reasons = "; ".join(problems)
            warnings.append(
                f"{path} is saved, but has no folder {EXPORTED}, and each later save tries again: "
                f"{reasons}"
            )
    return warnings


def _export(path: Path) -> None:
    """Write the Hugging Face folder of a checkpoint, if its run has asked for one. Raises
    UserError."""
    store = Store(path)
    keys = read_table(store, "run")
    if keys.get(KEY) != toml("hf"):
        return
    averages = keys.get(AVERAGE_KEY) == toml(True)
    # moments are not read
    read = store.files_of("weight") | set(tokenizer_files(store))
    if averages:
        read |= store.files_of(EMA)
    require_intact(store, read)
    source = open_native(path)
    if averages:
        source = averaged(source)
    target = hf_target(source, None)
    if not is_remote(path):
        convert(source, target, path / EXPORTED, _no_progress)
        return
    with scratch_folder("export") as folder:
        here = Path(folder) / EXPORTED
        convert(source, target, here, _no_progress)
        in_order = sorted(here.iterdir(), key=lambda file: file.name == CONFIG)  # config.json last
        for file in in_order:
            send(file, path / EXPORTED / file.name)


def _is_exported(path: Path) -> bool:
    """Return True if a checkpoint has its Hugging Face folder. Raises PlaceError."""
    if is_remote(path):
        return is_object(path / EXPORTED / CONFIG)
    return (path / EXPORTED).exists()


def _no_progress(written: int, what: str) -> None:
    """Say nothing: steps are taken meanwhile."""
