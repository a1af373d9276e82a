"""Runs that `megaprec parity --oracle` compares on one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from megaprec.tokens.samples import Batch, Samples
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

# keys of documents, and of the optimizer, besides those of the model
DOCUMENTS = [
    "data.reset_attention_mask=true",
    "data.reset_position_ids=true",
    "data.eod_mask_loss=true",
]
OPTIMIZER = [
    "model.z_loss=0.01",
    "lr.schedule=linear",
    "lr.final=1e-5",
    "optimizer.norm=3.0",
    "optimizer.ema=0.9",
    'optimizer.groups=[{pattern = "embedding.*", lr = 0.5, weight_decay = 0.0}, '
    '{pattern = "layers.0.*", all_dims = true}]',
]
COMPARED = ("loss", "gradient", "gradient norm", "learning rate", "weights", "moments")
# families in which documents can be told apart
PACKED = [family for family in CASES if family != "llama dynamic"]


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


def assert_all_is_proven(entry: dict[str, Any]) -> None:
    """Require that all that a step has was compared, and is equal to rounding."""
    assert entry["verdict"] == "proven", entry.get("first")
    for quantity in COMPARED:
        measured = entry["quantities"][quantity]
        assert measured["verdict"] == "proven"
        assert measured["compared"] >= 3
        assert measured["error"] < 1e-9


def assert_rounding_shows(words: list[str], folder: Path, oracle: str = "transformers") -> None:
    """Require that a run in FP32 is proven, and differs from the oracle by its rounding."""
    certificate = beside_oracle([*words, "precision.compute=fp32"], folder, "both", oracle)
    precisions = {entry["precision"]: entry for entry in certificate["layouts"]}
    assert {entry["verdict"] for entry in precisions.values()} == {"proven"}
    assert 0 < precisions["fp32"]["quantities"]["loss"]["error"] < 1e-6


def plant_in_batches(patch: pytest.MonkeyPatch, change: Callable[[Batch], None]) -> None:
    """Change each batch that is made, in all layouts alike."""
    right = Samples.batch

    def batch(self: Samples, position: int, count: int) -> Batch:
        made = right(self, position, count)
        change(made)
        return made

    patch.setattr(Samples, "batch", batch)


def shift_targets(batch: Batch) -> None:
    """Make each target the token after the right one."""
    batch.targets.copy_(batch.targets.roll(-1, 1))
