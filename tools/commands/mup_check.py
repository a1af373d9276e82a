"""`megaprec mup-check RUN.toml`: check whether activations move equally far at all widths.

Models of several hidden sizes, two layers deep, take a few steps on one sample with the optimizer
of the run. Under muP (model.mup_base_hidden) what an update changes in each activation does not
depend on the width: the slope of its size in the width, both as logarithms, is about 0. Without muP
it grows. All is computed in FP32 in this process, whatever the layout of the run. Exit code 0:
proven; 1: an activation moves farther, or less far, the wider the model is; 2: it could not be
tried, or wrong input.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich import box
from rich.table import Table

from megaprec.errors import UserError
from megaprec.optim.rules.param_groups import Group
from megaprec.precision.patterns import match_patterns
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from parallel.described_world import is_rank_of_world
from tools.analysis.plots.drawing import require_picture_path
from tools.analysis.plots.mup_plot import draw
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.resolved_run import resolve_run
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Optimizer
from tools.console.json_output import add_json, print_result
from tools.console.tables import print_table
from tools.console.wrapped import say
from tools.training.fp8_summary import require_fp8_computed
from tools.verify.mup_check.measure import Training, measure_draws
from tools.verify.mup_check.slopes import (
    LARGEST_INITIAL_SLOPE,
    LARGEST_SLOPE,
    overall,
    rows,
)
from tools.verify.mup_check.widths import LAYERS, LENGTH, Growing, default_widths, models_at
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG, run_digest, versions

FORMAT = "megaprec mup-check 1"
CODES = {PROVEN: 0, WRONG: 1, NOT_TRIED: 2}
COLORS = {PROVEN: "green", WRONG: "red", NOT_TRIED: "yellow"}
RATE = 3e-5
"""Learning rate of all steps: so low that changes are in proportion to it."""
MAX_STEPS = 100
DRAWS = 3
"""Seeds whose sizes are averaged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mup-check`."""
    parser.description = __doc__
    parser.add_argument("file", metavar="RUN.toml", help="run file")
    add_overrides(parser)
    parser.add_argument(
        "--widths",
        default="",
        metavar="64,128,256,512",
        help="hidden sizes; default: that of the base model times 1, 2, 4 and 8, or smaller ones "
        "that a CPU computes in seconds",
    )
    parser.add_argument(
        "--grow",
        choices=get_args(Growing),
        default="heads",
        help="part of attention that grows: the number of heads, or their width (default: heads)",
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="number of steps (default: 4)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=RATE,
        metavar="RATE",
        help=f"learning rate of all steps, in place of the run's schedule (default: {RATE:g})",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="file of the picture")
    add_json(parser)
    add_strict(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec mup-check`; return the exit code."""
    if is_rank_of_world():
        raise UserError.of("command.mup_check_launched")
    config = resolve_run(args.file, args.overrides)
    require_fp8_computed(config)
    tell_notes([*config.notes, *_frozen_notes(config)], args.strict)
    widths = _require_sound(args, config)
    certificate = certify(args, config, widths)
    if args.plot:
        draw(certificate, args.plot)
    print_result(args, lambda: certificate, lambda: show(certificate))
    if args.plot and not args.json:
        print(f"written    {args.plot}")
    return CODES[certificate["verdict"]]


def _frozen_notes(config: RunConfig) -> Iterator[str]:
    if config.optimizer.frozen:
        yield (
            "optimizer.frozen has no effect on mup-check: all parameters are trained, for the "
            "updates of each are measured"
        )


def _require_sound(args: argparse.Namespace, config: RunConfig) -> list[int]:
    """Return the hidden sizes. Raises UserError for arguments and runs that cannot be tried."""
    if not 1 <= args.steps <= MAX_STEPS:
        raise UserError.of("command.mup_check_steps", steps=args.steps, most=MAX_STEPS)
    if not 0 < args.lr < 1:
        raise UserError.of("command.mup_check_rate", rate=args.lr)
    if config.model.factory:
        raise UserError.of(
            "model.factory_not_built_in", factory=config.model.factory, what="mup-check"
        )
    if args.plot:
        require_picture_path(args.plot)
    if not args.widths:
        return default_widths(config.model, args.grow)
    return _parse_widths(args.widths)


def _parse_widths(text: str) -> list[int]:
    """Return hidden sizes in increasing order. Raises UserError unless there are two or more."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError.of("command.mup_check_widths", widths=text)
    widths = sorted({int(word) for word in words})
    if len(widths) < 2:
        raise UserError.of("command.mup_check_widths", widths=text)
    return widths


def certify(args: argparse.Namespace, config: RunConfig, widths: Sequence[int]) -> dict[str, Any]:
    """Measure all widths and return the certificate."""
    models = models_at(config.model, widths, args.grow)
    training = _training(args, config, models[0])
    all_rows = rows(widths, [measure_draws(model, training, DRAWS) for model in models])
    return {
        "format": FORMAT,
        "verdict": overall(all_rows),
        "parametrization": _parametrization(config.model),
        "versions": versions() | {"cpu": torch.backends.cpu.get_cpu_capability()},
        "configuration": {"file": args.file, "sha256": run_digest(config)},
        "optimizer": config.optimizer.name,
        "widths": list(widths),
        "grows": args.grow,
        "layers": models[0].layers,
        "draws": DRAWS,
        "steps": args.steps,
        "rate": args.lr,
        "largest_slope": LARGEST_SLOPE,
        "largest_initial_slope": LARGEST_INITIAL_SLOPE,
        "left_out": _left_out(config.model),
        "rows": all_rows,
    }


def _training(args: argparse.Namespace, config: RunConfig, model: ModelConfig) -> Training:
    """Return how all models are trained. model: one of them."""
    return Training(
        rule=make_rule(config.optimizer),
        rate=args.lr,
        weight_decay=config.optimizer.weight_decay,
        clip=config.optimizer.clip,
        groups=_groups(config.optimizer, model),
        steps=args.steps,
        seed=config.train.seed,
        length=LENGTH,
        plan=plan("fp32"),
    )


def _groups(optimizer: Optimizer, model: ModelConfig) -> list[Group]:
    """Return the groups of the run that concern the model, which has fewer layers."""
    names = [*logical_shapes(model)]
    matched = match_patterns([group.pattern for group in optimizer.groups], names)
    groups: list[Group] = []
    for group, is_used in zip(optimizer.groups, matched, strict=True):
        if is_used:
            groups.append(Group(**group.model_dump()))
    return groups


def _left_out(model: ModelConfig) -> list[str]:
    """Return a line for each part of the model that is not measured."""
    lines: list[str] = []
    if model.mtp_layers:
        lines.append(f"model.mtp_layers = {model.mtp_layers}: these modules are not measured")
    if model.experts:
        lines.append("model.experts_per_token: each token passes all of the experts")
    if model.layers > LAYERS:
        lines.append(f"model.layers = {model.layers}: {LAYERS} of them are measured")
    return lines


def _parametrization(model: ModelConfig) -> str:
    """Return the name of the rules by which the model grows."""
    if model.mup_base_hidden:
        return f"muP, base hidden {model.mup_base_hidden}"
    return "standard parametrization"


def show(certificate: dict[str, Any]) -> None:
    """Print the rows as a table, then the reasons and the conclusion."""
    widths = certificate["widths"]
    say(
        f"{certificate['parametrization']}: hidden {', '.join(map(str, widths))}, growing "
        f"{certificate['grows']}, {certificate['steps']} steps of {certificate['optimizer']}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("activation")
    for width in widths:
        table.add_column(f"change at {width}", justify="right")
    for column in ("slope", "slope before"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in certificate["rows"]:
        color = COLORS[row["verdict"]]
        # one item a step: shown are those of the last
        last_changes = row["changes"][-1]
        last_slope = row["slopes"][-1]
        sizes = [f"{size:.2e}" for size in last_changes]
        slopes = [_in_words(last_slope), _in_words(row["initial_slope"])]
        table.add_row(row["activation"], *sizes, *slopes, f"[{color}]{row['verdict']}[/]")
    print_table(table)
    for row in certificate["rows"]:
        if "why" in row:
            say(f"{row['activation']}: {row['why']}")
    for line in certificate["left_out"]:
        say(line)
    say(conclusion(certificate))


def _in_words(slope: float | None) -> str:
    return "-" if slope is None else f"{slope:+.2f}"


def conclusion(certificate: dict[str, Any]) -> str:
    """Return the result in a sentence."""
    bound = f"slopes of changes within {certificate['largest_slope']}"
    if certificate["verdict"] == PROVEN:
        return f"proven: updates reach equally far at all widths ({bound})"
    if certificate["verdict"] == NOT_TRIED:
        return f"not tried: see above ({bound})"
    wrong = sum(row["verdict"] == WRONG for row in certificate["rows"])
    text = f"NOT proven: {wrong} of {len(certificate['rows'])} activations depend on the width"
    if certificate["parametrization"].startswith("standard"):
        text += "; model.mup_base_hidden would turn muP on"
    return f"{text} ({bound})"
