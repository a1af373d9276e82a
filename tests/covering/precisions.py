"""Every pair of options of mixed precision, in some layout, beside the oracle in float64.

Rounding is not a fault, so the bounds are multiples of one rounding to the coarsest dtype of the
run's products: of loss and all gradients of the first step, and of the way that the weights have
gone after the last one. They find what is left out, doubled or added to the wrong
tensor, in a path that only some precision takes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.precision.fp8_recipe import SCALE_KINDS
from tests.covering.options import Row, of_twice_the_layers
from tests.covering.trial import STEPS, TRAIN, Outcome, Together
from tests.parity.campaign import forked
from tests.parity.oracle_runs import words_of
from tools.commands import parity
from tools.config.run_file import RunConfig, load_run
from tools.training.fp8_summary import require_fp8_computed
from tools.verify.oracle.training import trained
from tools.verify.oracle.transformers_model import TransformersModel
from tools.verify.parity.ranks import RecordedRun, run_alone
from tools.verify.parity.record import Plan, Record, gather
from tools.verify.parity.runs import alone, epsilon, in_float64

FAMILIES = ("llama", "gpt2", "gemma2", "mixtral", "deepseek_v3 yarn", "qwen3_next", "nemotron_h")
LAYOUTS: dict[str, list[str]] = {
    "one process": [],
    "tensor": ["parallel.tensor=2"],
    "tensor, cut sequence": ["parallel.tensor=2", "parallel.sequence=true"],
    "pipeline": ["parallel.pipeline=2"],
    "zb-v": ["parallel.pipeline=2", "parallel.schedule=zb-v"],
    "data": ["parallel.data=2"],
    "data, ZeRO-2": ["parallel.data=2", "parallel.zero=2"],
    "context": ["parallel.context=2"],
}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "family": {family: [*words_of(family), *of_twice_the_layers(family)] for family in FAMILIES},
    "layout": LAYOUTS,
    "compute": {
        "bf16": ["precision.compute=bf16"],
        "fp16": ["precision.compute=fp16"],
        "fp32": ["precision.compute=fp32"],
    },
    "fp8": {
        "none": [],
        **{kind: [f"fp8.kind={kind}", "fp8.pad=true"] for kind in SCALE_KINDS},
    },
    "fp8 weights": {"no": [], "yes": ["fp8.parameters=true"]},
    "parameters": {"as products": [], "fp32": ["precision.parameters=fp32"]},
    "gradients": {"fp32": [], "bf16": ["precision.gradients=bf16"]},
    "reduce": {"as gradients": [], "bf16": ["precision.reduce=bf16"]},
    "masters": {
        "fp32": [],
        "split": ["precision.masters=split"],
        "none": ["precision.masters=none", "precision.rounding=stochastic"],
    },
    "moments": {"fp32": [], "bf16": ["precision.moments=bf16"]},
    "residual": {"as products": [], "fp32": ["precision.residual=fp32"]},
    "attention": {"as products": [], "fp32": ["precision.attention=fp32"]},
    "output": {"as products": [], "fp32": ["precision.output=fp32"]},
    "recompute": {"none": [], "full": ["parallel.recompute=full"]},
}
# of one rounding: the bounds of the loss, of gradients, and of the way of the weights
LOSS_UNITS = 1.0
GRADIENT_UNITS = 3.0
# of the gradient of each tensor; 3.3 is the largest of 55 rows
TENSOR_UNITS = 6.0
SHARE_OF_MEAN = 0.1
# rounding sends a token to another expert, which few tokens have
SHARE_OF_EXPERTS = 1.0
# AdamW moves a weight by the sign of its gradient, which rounding changes where that is small; the
# error of weights that stay, or go twice as far, is 1
WAY_BOUND = 0.4
WAY_BOUND_FP8 = 0.9


@dataclass(frozen=True)
class Errors:
    """Relative errors: of the loss, of all gradients of the first step and of the worst tensor of
    them, and of the way of the weights."""

    loss: float
    gradient: float
    tensor: float
    way: float


def words_of_row(row: Row) -> list[str]:
    """The words of a command that a row is."""
    words: list[str] = []
    for option, value in row.items():
        words += OPTIONS[option][value]
    return words


def config_of(row: Row) -> RunConfig:
    """The run of a row. Raises UserError for one that is refused."""
    words = [*words_of_row(row), *TRAIN, "train.global_batch=8", "train.micro_batch=2"]
    return load_run(None, [*words, "lr.warmup=0", "lr.schedule=constant"])


def refusal(row: Row) -> str:
    """The codes of the rules that refuse a row; empty if none does."""
    try:
        _ready(config_of(row), Path("unused"))
    except UserError as error:
        return ", ".join(problem.code or str(problem) for problem in error.problems)
    return ""


def _ready(config: RunConfig, folder: Path) -> RunConfig:
    require_fp8_computed(config)
    limits = parity.LayoutLimits(*(getattr(config.parallel, axis) for axis in parity.AXES))
    ready = parity.made_ready(config, limits, False, STEPS, folder)
    # a small size may not fit the layout
    keys = config.parallel.model_dump(exclude_defaults=True)
    parity.fitting_layouts(ready, [keys], explicit=True)
    return ready


def errors_of(row: Row, folder: Path, together: Together = forked) -> tuple[Errors, float]:
    """The errors of a row, and one unit in the last place of its products."""
    ready = _ready(config_of(row), folder / "run")
    ready = parity.with_random_tokens(ready, STEPS, folder)
    plan = Plan(STEPS)
    exact = alone(in_float64(ready))
    initial = run_alone(RecordedRun(exact, Plan(1), folder / "initial")).tensors["before/weight"]
    oracle, _ = trained(exact, plan, initial, TransformersModel)
    run = RecordedRun(ready, plan, folder / "group" / "000")
    together([run], folder / "group")
    return _errors(gather(run.folder), oracle), epsilon(ready)


def _errors(ours: Record, oracle: Record) -> Errors:
    loss = abs(ours.steps[0]["loss"] / oracle.steps[0]["loss"] - 1)
    last = f"after/{STEPS - 1}/weight"
    our_way = _flat(ours.tensors[last], ours) - _flat(ours.tensors["before/weight"], ours)
    their_way = _flat(oracle.tensors[last], ours) - _flat(oracle.tensors["before/weight"], ours)
    return Errors(
        loss=loss,
        gradient=_error(
            _flat(ours.tensors["gradient/0"], ours), _flat(oracle.tensors["gradient/0"], ours)
        ),
        tensor=_error_of_worst_tensor(ours, oracle),
        way=_error(our_way, their_way),
    )


def _flat(tensors: dict[str, Tensor], record: Record) -> Tensor:
    """All tensors that are trained by gradients, one after the other."""
    names = [name for name in record.names if not name.endswith(".correction")]
    return torch.cat([tensors[name].flatten().double() for name in names])


def _error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def _error_of_worst_tensor(ours: Record, oracle: Record) -> float:
    """Return the largest error of a gradient of the first step, over its norm or, if that is
    larger, over a share of what a tensor of its size has in the mean."""
    theirs = oracle.tensors["gradient/0"]
    everything = _flat(theirs, ours)
    mean = everything.norm() / everything.numel() ** 0.5
    worst = 0.0
    for name in ours.names:
        if name.endswith(".correction"):
            continue
        right = theirs[name].double()
        share = SHARE_OF_EXPERTS if ".experts." in name else SHARE_OF_MEAN
        size = torch.maximum(right.norm(), share * mean * right.numel() ** 0.5)
        error = (ours.tensors["gradient/0"][name].double() - right).norm() / size
        # a NaN is the worst
        worst = max(worst, error.item()) if error.isfinite() else float("inf")
    return worst


def tried(row: Row, folder: Path, together: Together = forked) -> Outcome:
    """Train the row in its layout and by the oracle."""
    if why := refusal(row):
        return Outcome("refused", why)
    errors, unit = errors_of(row, folder, together)
    bounds = Errors(
        loss=LOSS_UNITS * unit,
        gradient=GRADIENT_UNITS * unit,
        tensor=TENSOR_UNITS * unit,
        way=WAY_BOUND if row["fp8"] == "none" else WAY_BOUND_FP8,
    )
    found = vars(errors)
    in_roundings = ", ".join(f"{name} {error / unit:.2f}" for name, error in found.items())
    wrong = [
        f"{name}: {error:.2g}, bound {vars(bounds)[name]:.2g}"
        for name, error in found.items()
        if not error <= vars(bounds)[name]
    ]
    if wrong:
        return Outcome("wrong", "; ".join(wrong))
    return Outcome("equal", f"in roundings: {in_roundings}")
