"""What `megaprec plan` predicts for training runs whose speed others have published.

    python -m tests.planning.backtest            # the table of docs/planning.md
    python -m tests.planning.backtest --fit      # fits the constants of reached.py anew

`published.toml` has the runs: model, layout, GPU, speed and source. What a run file cannot say is
left out of the run that is planned. FSDP is planned as ZeRO-2 that also gathers weights.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models.estimate.gpus import GPU, gpu_named
from tools.analysis.planning.assumptions import Assumptions
from tools.analysis.planning.memory import PlannedPasses
from tools.analysis.planning.seconds.traffic import elements_of_pipeline, replica_bytes
from tools.analysis.planning.speed import Prediction, passes_of, predict_passes
from tools.config.run_file import RunConfig, load_run

TABLE = Path(__file__).parent / "published.toml"


@dataclass(frozen=True)
class Published:
    """A published run: its row of the table, its run file, and the passes of a step."""

    row: Mapping[str, Any]
    config: RunConfig
    passes: PlannedPasses

    @property
    def gpu(self) -> GPU:
        """The GPU that the run had."""
        gpu = gpu_named(self.row["gpu"])
        assert gpu is not None
        return gpu

    @property
    def model(self) -> str:
        """The model, whatever its layout and the precision: what is held out together."""
        return repr(sorted(self.row["model"].items()))

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        speed = self.row["tokens_per_s"] * self.row["gpus"]
        return self.config.tokens_per_step / speed

    def predicted(self, assumed: Assumptions) -> Prediction:
        """Return the predicted step, with state spread evenly over the pipeline."""
        config = self.config
        elements = sum(elements_of_pipeline(config)) / config.parallel.pipeline
        plan = config.plan
        gradients = elements * plan.gradients.itemsize
        weights = elements * plan.parameters.itemsize
        sent = replica_bytes(config, gradients, weights) + self._gathered(weights)
        return predict_passes(config, self.passes, sent, elements, assumed)

    def _gathered(self, weights: float) -> float:
        """Return the bytes that FSDP gathers beside those of ZeRO-2: the weights before each pass of
        a micro-batch; in a pipeline they are kept over a step. weights: bytes of a rank."""
        layout = self.row["layout"]
        if not layout["fsdp"] or layout["pipeline"] > 1:
            return 0.0
        replicas = self.config.parallel.copies
        return 2 * self.config.num_microbatches * weights * (1 - 1 / replicas)


@cache
def published_runs() -> tuple[Published, ...]:
    """Return all runs of the table."""
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)["run"]
    return tuple(map(_published, rows))


def _published(row: Mapping[str, Any]) -> Published:
    """Return the run of a row."""
    config = load_run(None, run_keys(row)).on_device("cuda")
    return Published(row, config, passes_of(config))


def run_keys(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys of a row's run file, as on the command line."""
    layout = row["layout"]
    keys: dict[str, Any] = {f"model.{key}": value for key, value in row["model"].items()}
    for axis in ("tensor", "pipeline", "context", "data", "expert"):
        keys[f"parallel.{axis}"] = layout[axis]
    keys["parallel.sequence"] = layout["sequence"]
    keys["parallel.zero"] = layout["zero"]
    if layout["fsdp"] and layout["pipeline"] == 1 and layout["data"] > 1:
        keys["parallel.zero"] = 2
    if layout["expert"] > 1:
        keys["parallel.expert_tensor"] = 1
    if layout["chunks"] > 1:
        keys["parallel.schedule"] = "interleaved"
        keys["parallel.chunks"] = layout["chunks"]
    keys |= RECOMPUTE[row["recompute"]]
    keys["precision.compute"] = "bf16"
    if row["precision"] == "fp8":
        keys |= {"fp8.kind": "delayed", "fp8.pad": True}
    keys["train.seq_length"] = row["seq_length"]
    keys["train.global_batch"] = row["global_batch"]
    keys["train.micro_batch"] = row["micro_batch"]
    keys["train.steps"] = 10
    keys["data.vocab_size"] = 512
    return [f"{key}={_as_toml(value)}" for key, value in keys.items()]


RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"parallel.recompute": "selective", "parallel.recompute_modules": ["attention"]},
    "full": {"parallel.recompute": "full", "parallel.recompute_fraction": 1.0},
}


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return repr(value)
