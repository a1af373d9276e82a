"""Arguments that several commands have."""

import os
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

import torch

from megaprec.errors import UserError
from megaprec.tokens.places import is_url, path_of
from megaprec.url_secrets import has_password, masked


def model_place(text: str) -> Path:
    """Return the folder or URL of a model that a command reads."""
    if has_password(text):
        remedy = "take the password out, and set it in the environment"
        raise ArgumentTypeError(f"{masked(text)}: {remedy}")
    try:
        return path_of(text.rstrip("/") or text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from error


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
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    devices = torch.cuda.device_count()
    if wanted == "cuda" and devices < ranks:
        raise UserError.of("command.option_device", devices=devices, ranks=ranks)
    return "cuda" if wanted != "cpu" and devices >= ranks else "cpu"
