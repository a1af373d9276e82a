"""The parts of a run that the oracle cannot say: what is left out of both runs, and named, and what
is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaprec.errors import Problem, UserError
from tools.config.run_file import RunConfig

UPDATE_RULES = ("adamw",)
PRECISIONS = ("fp32", "fp64")


@dataclass(frozen=True)
class LeftOut:
    """A part of the run that is compared without it. update: of [model], that leaves it out."""

    part: str
    reason: str
    update: dict[str, Any]


def left_out(config: RunConfig) -> list[LeftOut]:
    """Return the parts of the run's loss and model that transformers has not, or computes by
    another formula."""
    model = config.model
    parts: list[LeftOut] = []
    if model.experts and model.router_aux_loss:
        reason = "transformers balances over the layers of a batch together"
        parts.append(LeftOut("model.router_aux_loss", reason, {"router_aux_loss": 0.0}))
    for key in ("router_z_loss", "mtp_layers"):
        if getattr(model, key):
            zero = type(getattr(model, key))(0)
            parts.append(LeftOut(f"model.{key}", "transformers has none", {key: zero}))
    for key in ("dropout", "embedding_dropout", "attention_dropout"):
        if getattr(model, key):
            reason = "transformers draws it from another generator"
            parts.append(LeftOut(f"model.{key}", reason, {key: 0.0}))
    return parts


def without_left_out(config: RunConfig) -> RunConfig:
    """Return the run without the parts that `left_out` returns."""
    update: dict[str, Any] = {}
    for each in left_out(config):
        update |= each.update
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def require_possible(config: RunConfig, own_precision: bool, full: bool) -> None:
    """Raise UserError that names all that the oracle cannot train.

    own_precision: the run is compared in its own precision, not in float64 alone. full: it is
        compared in its own size.
    """
    problems = list(_problems(config, own_precision))
    if full:
        problems.append(Problem.of("parity.oracle_full"))
    if problems:
        raise UserError(*problems)


def _problems(config: RunConfig, own_precision: bool) -> Iterator[Problem]:
    model = config.model
    optimizer = config.optimizer
    if model.factory:
        yield Problem.of("parity.oracle_factory", factory=model.factory)
    if optimizer.name not in UPDATE_RULES:
        yield Problem.of("parity.oracle_rule", name=optimizer.name)
    if model.mup_base_hidden:
        yield Problem.of("parity.oracle_mup", base=model.mup_base_hidden)
    if config.data.reset_attention_mask and model.rope_scaling.kind == "dynamic":
        yield Problem.of("parity.oracle_dynamic")
    if own_precision and config.precision.compute not in PRECISIONS:
        yield Problem.of("parity.oracle_precision", compute=config.precision.compute)
