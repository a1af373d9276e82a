"""The runs that are compared: the user's run for a few steps on one process, in float64 and in its
own precision."""

from math import inf
from pathlib import Path

import torch

from megaprec.data.indexed import IndexedWriter
from megaprec.precision.plan import dtype_name
from tools.config.data_settings import Data
from tools.config.layouts import ALONE
from tools.config.precision_settings import FP8, Precision
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.parity.gather import Record
from tools.parity.record import Plan
from tools.parity.shrink import LayoutLimits, shrunk

# keys of [precision] that are dtypes, or only make sense with some
DTYPE_KEYS = (
    "compute",
    "parameters",
    "gradients",
    "reduce",
    "masters",
    "moments",
    "rounding",
    "pipeline",
    "buffers",
    "residual",
    "attention",
    "scores",
    "output",
    "tf32",
)
# what documents change, of [data]
RESETS = (
    "reset_attention_mask",
    "reset_position_ids",
    "eod_mask_loss",
)
# one unit in the last place of 1
EPSILON = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "tf32": 2.0**-10,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    "fp8": 2.0**-3,
}


def made_ready(
    config: RunConfig, most: LayoutLimits, full: bool, steps: int, folder: Path
) -> RunConfig:
    """Return the run as it is compared, small unless `full`, in its own layout. folder: folder for
    its files."""
    ready = config if full else shrunk(config, most)
    # evaluations and checks change no number of a step
    train = {
        "steps": max(steps, config.train.steps) if full else steps,
        "folder": str(folder),
        "eval_every": 0,
        "sentinel": 0,
        "threads": 1,
        "device": "cpu",
    }
    precision: dict[str, object] = {"trace_overflows": False, "masters_in_checkpoint": True}
    if config.precision.on_nonfinite == "raise":
        precision["on_nonfinite"] = "skip"
    return ready.model_copy(
        update={
            "train": ready.train.model_copy(update=train),
            "precision": ready.precision.model_copy(update=precision),
            "optimizer": ready.optimizer.model_copy(update={"validation": "before"}),
            "log": ready.log.model_copy(update={"sample": "", "timeline": 0, "digests": 0}),
        }
    )


def with_random_tokens(config: RunConfig, steps: int, folder: Path) -> RunConfig:
    """Return the run on random tokens, which are written to `folder`.

    Documents end within samples, and a quarter of the vocabulary never occurs.
    """
    vocab = config.model.vocab
    train = config.train
    count = (steps + 1) * train.global_batch * train.seq_length + 1
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(0, max(1, vocab * 3 // 4), (count,), generator=generator)
    prefix = folder / "tokens"
    with IndexedWriter(prefix, vocab) as writer:
        for document in tokens.split(train.seq_length * 2 // 3 + 1):
            writer.add_document(document.tolist())
    settings = {key: getattr(config.data, key) for key in ("shuffle", *RESETS)}
    data = Data(source=str(prefix), vocab_size=vocab, held_out=0.0, **settings)
    return config.model_copy(update={"data": data})


def in_float64(config: RunConfig) -> RunConfig:
    """Return the run with every dtype float64 and its loss scaling unchanged."""
    others = {key: value for key, value in config.precision if key not in DTYPE_KEYS}
    precision = Precision(**{**others, "compute": "fp64"})
    return config.model_copy(update={"precision": precision, "fp8": FP8()})


def alone(config: RunConfig) -> RunConfig:
    """Return the run on one process."""
    return config.model_copy(update={"parallel": ALONE})


def epsilon(config: RunConfig) -> float:
    """Return one unit in the last place of the coarsest dtype of products and sums of gradients."""
    plan = config.plan
    dtypes = (
        plan.compute,
        plan.attention,
        plan.scores,
        plan.gradients,
        plan.reduce,
        plan.pipeline,
    )
    names = [dtype_name(dtype) for dtype in dtypes]
    if plan.fp8:
        names.append("fp8")
    if plan.tf32:
        names.append("tf32")
    return max(EPSILON[name] for name in names)


def kept(config: RunConfig) -> dict[str, float]:
    """Return one unit in the last place of the optimizer's weights, and of its moments."""
    plan = config.plan
    return {
        "weights": EPSILON[dtype_name(plan.masters)],
        "moments": EPSILON[dtype_name(plan.moments)],
    }


def tokens_per_expert(config: RunConfig) -> float:
    """Return the average tokens of an expert in one step; infinite without experts."""
    model = config.model
    if model.experts:
        return config.tokens_per_step * model.experts_per_token / model.experts
    return inf


def clipped(config: RunConfig, probe: Record) -> RunConfig:
    """Return the run with a clip norm that is exceeded, if it clips at all. probe: one step of
    it."""
    norm = probe.steps[0]["grad_norm"]
    if not 0 < norm <= config.optimizer.clip:
        return config
    clip = float(f"{norm / 2:.2g}")
    optimizer = config.optimizer.model_copy(update={"clip": clip})
    return config.model_copy(update={"optimizer": optimizer})


def planned(config: RunConfig, probe: Record, steps: int, full: bool) -> Plan:
    """Return the plan: `steps` applied steps, and after the first of them one with an infinity in
    the largest tensor.

    No infinity is planted if non-finite steps are applied.
    """
    if config.precision.on_nonfinite == "ignore":
        return Plan(steps, small=not full)
    weights = probe.tensors["before/weight"]
    into = max(probe.names, key=lambda name: (weights[name].dim(), weights[name].numel()))
    return Plan(steps + 1, not full, planted=1, into=into)


def shown(value: object) -> str:
    """Return the value of a key as a run file writes it."""
    return toml(value)
