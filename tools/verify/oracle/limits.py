"""The parts of a run that the oracle cannot say: what is left out of both runs, and named, and what
is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megaprec.errors import Problem, UserError
from megaprec.precision.plan import PrecisionPlan
from tools.config.run_file import RunConfig
from tools.convert.hf.config import model_type_of
from tools.convert.transformers_package import quiet_transformers, why_missing
from tools.verify.oracle.update_rules import ORACLE_RULES, oracle_rule

TRANSFORMERS = "transformers"
STEPS = 5  # at least, so that the rates of all schedules differ from each other
OLDEST = 5  # of transformers' major versions
# dtypes of a plan, all of which the oracle has in FP32
DTYPES_OF_PLAN = (
    "compute",
    "residual",
    "pipeline",
    "attention",
    "parameters",
    "gradients",
    "reduce",
    "masters",
    "moments",
    "scores",
    "buffers",
    "output",
)


@dataclass(frozen=True)
class LeftOut:
    """A part of the run that is compared without it. update: of [model], that leaves it out."""

    part: str
    reason: str
    update: dict[str, Any]


def left_out(config: RunConfig, oracle: str) -> list[LeftOut]:
    """Return the parts of the run's loss and model that the oracle has not, or computes by another
    formula. oracle: a name of `--oracle`."""
    beyond = _beyond_transformers if oracle == TRANSFORMERS else _beyond_plain
    parts = [*beyond(config)]
    for key in ("dropout", "embedding_dropout", "attention_dropout"):
        if getattr(config.model, key):
            reason = "the oracle would draw it from another generator"
            parts.append(LeftOut(f"model.{key}", reason, {key: 0.0}))
    return parts


def _beyond_plain(config: RunConfig) -> Iterator[LeftOut]:
    """Yield what a plain decoder cannot say where it runs each document alone."""
    if not config.data.reset_attention_mask:
        return
    for key in ("router_aux_loss", "router_z_loss", "mtp_layers"):
        value = getattr(config.model, key)
        if value and (config.model.experts or key == "mtp_layers"):
            reason = "the oracle runs each document alone"
            yield LeftOut(f"model.{key}", reason, {key: type(value)(0)})


def _beyond_transformers(config: RunConfig) -> Iterator[LeftOut]:
    """Yield the parts of a model's loss and gradients that transformers lacks or computes by
    another formula."""
    model = config.model
    if model.experts and model.router_aux_loss:
        reason = "transformers balances over the layers of a batch together"
        yield LeftOut("model.router_aux_loss", reason, {"router_aux_loss": 0.0})
    for key in ("router_z_loss", "mtp_layers"):
        value = getattr(model, key)
        if value:
            zero = type(value)(0)  # an int or a float, as the key has it
            yield LeftOut(f"model.{key}", "transformers has none", {key: zero})
    for key in ("embedding_grad_scale", "head_grad_scale"):
        if getattr(model, key) != 1.0:
            yield LeftOut(f"model.{key}", "transformers has none", {key: 1.0})


def without_left_out(config: RunConfig, oracle: str) -> RunConfig:
    """Return the run without the parts that `left_out` returns."""
    update: dict[str, Any] = {}
    for part in left_out(config, oracle):
        update |= part.update
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def require_possible(config: RunConfig, oracle: str, own_precision: bool, full: bool) -> None:
    """Raise UserError that names all that the oracle cannot train.

    oracle: a name of `--oracle`.
    own_precision: the run is compared in its own precision, not in float64 alone. full: it is
        compared in its own size.
    """
    problems = list(_problems(config, own_precision))
    if full:
        problems.append(Problem.of("parity.oracle_full"))
    if problems:
        raise UserError(*problems)
    if oracle == TRANSFORMERS:
        _require_family(config)
        _require_transformers()


def _require_family(config: RunConfig) -> None:
    """Raise UserError if transformers has no such model."""
    try:
        model_type_of(without_left_out(config, TRANSFORMERS).sized_model)
    except UserError as error:
        problems = [problem.within("--oracle: ") for problem in error.problems]
        raise UserError(*problems) from error


def _require_transformers() -> None:
    """Raise UserError if transformers is missing or too old."""
    try:
        with quiet_transformers() as transformers:
            version = transformers.__version__
    except ImportError as problem:
        raise UserError.of(
            "parity.oracle_transformers", why_missing=why_missing(problem)
        ) from problem
    if int(version.partition(".")[0]) < OLDEST:
        raise UserError.of("parity.oracle_old", version=version, oldest=OLDEST)


def _problems(config: RunConfig, own_precision: bool) -> Iterator[Problem]:
    """Yield why an oracle cannot train a run. own_precision: see `require_possible`."""
    model = config.model
    optimizer = config.optimizer
    if model.factory:
        yield Problem.of("parity.oracle_factory", factory=model.factory)
    if oracle_rule(optimizer) is None:
        known = ", ".join(ORACLE_RULES)
        yield Problem.of("parity.oracle_rule", name=optimizer.name, known=known)
    if optimizer.frozen:
        yield Problem.of("parity.oracle_frozen", patterns=", ".join(optimizer.frozen))
    if model.mup_base_hidden:
        yield Problem.of("parity.oracle_mup", base=model.mup_base_hidden)
    resets = config.data.reset_attention_mask or config.data.reset_position_ids
    if resets and model.rope_scaling.kind == "dynamic":
        yield Problem.of("parity.oracle_dynamic")
    if own_precision and not _is_all_fp32(config.plan):
        yield Problem.of("parity.oracle_precision", compute=config.precision.compute)


def _is_all_fp32(plan: PrecisionPlan) -> bool:
    """Return True if nothing of a run is rounded to another dtype than FP32."""
    dtypes = {getattr(plan, name) for name in DTYPES_OF_PLAN}
    return dtypes == {torch.float32} and plan.fp8 is None and not plan.tf32
