"""Arguments that several commands have."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import torch

from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.tokens.places import is_remote, is_url, path_of
from megaprec.url_secrets import has_password, masked
from parallel.described_world import read_number
from tools.config.run_file import run_file_in, saved_run


def model_place(text: str) -> Path:
    """Return the folder or URL of a model that a command reads; of a run folder whose checkpoints
    are elsewhere that of these."""
    return _as_argument(text, checkpoints_elsewhere)


def run_or_model_place(text: str) -> Path:
    """Return the folder or URL of a run or a model that a command reads, as it was given."""
    return _as_argument(text, lambda path: path)


def _as_argument(text: str, place_of: Callable[[Path], Path]) -> Path:
    """Return what `place_of` makes of a path or URL. Raises ArgumentTypeError if it cannot be
    read."""
    if has_password(text):
        remedy = "take the password out, and set it in the environment"
        raise ArgumentTypeError(f"{masked(text)}: {remedy}")
    try:
        return place_of(path_of(text.rstrip("/") or text))
    except UserError as error:
        raise ArgumentTypeError(str(error)) from error
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ArgumentTypeError(file_error(error)) from error


def checkpoints_elsewhere(path: Path) -> Path:
    """Return the checkpoint.folder of a run folder whose run sets one; otherwise the path itself,
    also of a run folder that cannot be read."""
    if is_remote(path) or not path.is_dir() or run_file_in(path, written_by_run=True) is None:
        return path
    try:
        config = saved_run(path)
    except UserError:  # of another version, which says nothing of its checkpoints
        return path
    return config.checkpoint_folder if config.checkpoint.folder else path


def new_folder(text: str) -> Path:
    """Return the folder that a command writes a model to."""
    if is_url(text):
        raise ArgumentTypeError(
            f"{masked(text)}: a model is written to a folder of this machine; copy it from there"
        )
    return Path(text)


def add_overrides(parser: ArgumentParser, place: str = "") -> None:
    """Add the keys of a run file that a command takes in place of the file's. place: where they
    must stand, after a semicolon.
    """
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help=f"keys that differ from the file{place}",
    )


def add_strict(parser: ArgumentParser) -> None:
    """Add `--strict`."""
    parser.add_argument(
        "--strict", action="store_true", help="refuse a configuration that produces notes"
    )


def add_vocab(parser: ArgumentParser) -> None:
    """Add the vocabulary size of folders that do not state it."""
    parser.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help="vocabulary size without padding, if a Megatron or NeMo folder does not state it",
    )


def add_ema(parser: ArgumentParser, verb: str) -> None:
    """Add `--ema`. verb: of what the command does to a model."""
    parser.add_argument(
        "--ema",
        action="store_true",
        help=f"{verb} the moving average of the weights that a run with optimizer.ema keeps",
    )


def add_device(parser: ArgumentParser) -> None:
    """Add `--device`, which `device_of_option` reads."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if each rank on this machine has a CUDA device, otherwise cpu (default)",
    )


def device_of_option(wanted: str, ranks: int) -> str:
    """Return the device that `--device` asks for: cpu or cuda. Raises UserError if there are fewer
    CUDA devices than ranks that need one.

    ranks: on this machine, unless a launcher says how many it has started.
    """
    ranks = read_number("LOCAL_WORLD_SIZE", default=str(ranks))
    devices = torch.cuda.device_count()
    if wanted == "cuda" and devices < ranks:
        raise UserError.of("command.option_device", devices=devices, ranks=ranks)
    return "cuda" if wanted != "cpu" and devices >= ranks else "cpu"
