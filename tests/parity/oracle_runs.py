"""Runs that `megaprec parity --oracle` compares on one process."""

from pathlib import Path
from typing import Any, Literal

from tests.families import CASES, config_of
from tools.commands.parity import Options, certify
from tools.config.run_file import load_run
from tools.console.toml import toml

ONE_PROCESS = "tp=1"
TRAIN = [
    "train.steps=9",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.seq_length=16",
    "train.folder=unused",
    "data.vocab_size=97",
    "lr.warmup=5",
]


def words_of(family: str) -> list[str]:
    """The words of a command that give a model of a family, an odd one."""
    fields = config_of(CASES[family]).model_dump(exclude={"init", "factory"})
    return [f"model.{key}={toml(value)}" for key, value in fields.items()]


def beside_oracle(
    words: list[str],
    folder: Path,
    precision: Literal["float64", "configured", "both"] = "float64",
    oracle: str = "transformers",
) -> dict[str, Any]:
    """The certificate of a run on one process beside the oracle."""
    options = Options("run.toml", [ONE_PROCESS], precision, oracle=oracle)
    config = load_run(None, [*words, *TRAIN])
    return certify(config, options, folder, lambda text: None)


def entry_beside_oracle(
    words: list[str], folder: Path, oracle: str = "transformers"
) -> dict[str, Any]:
    """What the certificate says of one process in float64."""
    first, *_ = beside_oracle(words, folder, oracle=oracle)["layouts"]
    return first
