"""`megaprec plan`: whether a run fits its devices, and how fast it would be, before anything is
started.

It prints the bytes of each pipeline rank by kind, the verdict for the device's memory, and a
predicted step. With `--ranks N` it prints all layouts of N ranks that fit, fastest first, and `-o
best.toml` writes the run in the first of them. Neither data nor a tokenizer is needed. What is not
known is said: nothing is guessed.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.precision.gemm import product
from megaprec.resources import cores
from megaprec.tokens.files import write_whole
from models.config import ModelConfig, require_builtin
from models.presets import PRESETS
from tools.analysis.calibration.record import differences, read_calibration
from tools.analysis.calibration.speeds import calibrated
from tools.analysis.planning.device import DeviceTarget, assumed_devices, target_of
from tools.analysis.planning.measured import factor_of, read_measured
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.reached import OTHER, assumptions_of
from tools.analysis.planning.remedies import cheapest_remedy
from tools.analysis.planning.report import (
    as_data,
    beyond_as_data,
    beyond_line,
    budget_line,
    layout_lines,
    memory_lines,
    none_found,
    prediction_lines,
    remedy_lines,
    run_lines,
)
from tools.analysis.planning.search import (
    LayoutSearch,
    Planned,
    least_of_mean_rank,
    plan_run,
    search,
)
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.plots.drawing import require_picture_path
from tools.analysis.plots.plan_plot import draw_plan
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.layouts import in_words
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.console.json_output import add_json
from tools.console.units import duration
from tools.console.wrapped import say
from tools.training.data_sources import sized_by_tokenizer
from tools.training.fp8_summary import require_fp8_computed

COMMENT = (
    "# Written by megaprec plan: the run in the layout that is predicted to be the fastest of "
    "{ranks} ranks."
)
# GB/s of gloo between processes of a machine: 1 MB summed between two ranks takes about half a ms
CPU_LINK = 2.0
MACHINE = 8  # ranks
GPU_LINK = 25.0  # GB/s within a machine of GPUs whose data sheet is not known: PCIe
SLOW_LINK = 50.0  # GB/s between machines: a 400 Gb/s network card for each GPU
LINE = 79  # characters of the line of progress
MAX_RANKS = 2**20  # beyond any cluster
NOTHING_FITS = 4  # exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    parser.description = __doc__
    parser.add_argument("file", metavar="RUN.toml", help="run file")
    add_overrides(parser)
    parser.add_argument(
        "--gpu", default="", metavar="NAME", help="GPU of each rank, such as H100 or A100"
    )
    parser.add_argument(
        "--gpu-memory",
        default="",
        metavar="SIZE",
        help="memory of each GPU, such as 80GB or 79.6GiB",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="rank all layouts of N ranks that fit"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="BEST.toml", help="write the run in the best layout"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="picture of the step by kind and of the fullest rank's memory, .svg or .png",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="folder of a finished run, by whose measured speed times are corrected",
    )
    parser.add_argument(
        "--calibrated",
        type=Path,
        metavar="FILE",
        help="file of megaprec calibrate, whose speeds take the place of the table's",
    )
    parser.add_argument(
        "--budget", type=float, metavar="HOURS", help="rank-hours whose tokens are told"
    )
    add_json(parser)
    _add_speeds(parser)
    add_strict(parser)
    parser.set_defaults(run=main)


def _add_speeds(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how fast devices and links are."""
    speeds = parser.add_argument_group("assumptions of the predicted step")
    speeds.add_argument(
        "--tflops", type=float, metavar="T", help="peak TFLOP/s of a rank (default: the GPU's own)"
    )
    speeds.add_argument(
        "--efficiency",
        type=float,
        metavar="E",
        help="fraction of it that products reach (default: what runs on such GPUs reach, otherwise "
        "0.5)",
    )
    speeds.add_argument(
        "--machine",
        type=int,
        metavar="N",
        help="ranks of a machine, with fast links (default: 8, and 72 of a rack of NVL72)",
    )
    speeds.add_argument(
        "--fast-link",
        type=float,
        metavar="G",
        help="GB/s that collectives reach within a machine (default: by the GPU's own)",
    )
    speeds.add_argument(
        "--slow-link",
        type=float,
        metavar="G",
        help="GB/s that collectives reach between machines, of each rank (default: by the card of "
        f"such GPUs, otherwise {SLOW_LINK:g})",
    )


def main(args: argparse.Namespace) -> int:
    """Run `megaprec plan`. Return NOTHING_FITS if the run does not fit, or with --ranks if none of
    the layouts does.
    """
    _check_options(args)
    config = resolve_run(args.file, args.overrides)
    tell_notes(config.notes, args.strict)
    require_builtin(config.model, "megaprec plan")
    require_fp8_computed(config)
    config, sized = sized_by_tokenizer(config)
    target = target_of(config, args.gpu, args.gpu_memory)
    config = config.on_device(target.device)
    target, assumed, notes = _find_speeds(config, target, args)
    notes = [*sized, *notes]
    planned = _plan_own_layout(config, target, assumed, args)
    shared_target, shared_speeds = _share_of_ranks(config, target, assumed, args)
    search_result = _search_layouts(config, shared_target, shared_speeds, args)
    answer = _Answer(config, planned, target, assumed, search_result, shared_target, shared_speeds)
    if args.json:
        # one document, and no line about the file
        print(json.dumps({**_document(answer), "notes": notes}, indent=2))
        _write_picture(args.plot, answer)
    else:
        _say_answer(answer, notes, args)
    return _exit_code(answer)


def _search_layouts(
    config: RunConfig,
    target: DeviceTarget,
    speeds: Assumptions | None,
    args: argparse.Namespace,
) -> LayoutSearch | None:
    """Return the layouts for --ranks, of which the best is written to --output; None without
    ranks."""
    if not args.ranks or not speeds:
        return None
    result = search(config, args.ranks, target, speeds, _show_progress)
    _require_layouts(result, args.ranks)
    if args.output and result.layouts:
        _write_best(args.output, args.ranks, result)
    return result


def _say_answer(answer: "_Answer", notes: Sequence[str], args: argparse.Namespace) -> None:
    """Print the plan as text, and write its picture."""
    config = answer.config
    lines = [*run_lines(config, answer.target), *(f"note       {note}" for note in notes), ""]
    # details of another number of ranks than is asked for would hide the answer
    if not args.ranks or args.ranks == config.world_size:
        lines += [*_lines_of_own_layout(answer, args.budget)]
    lines += [*_lines_of_layouts(answer, args)]
    say("\n".join(lines))
    if args.output and answer.search_result:
        done = "written" if answer.search_result.layouts else "not written"
        print(f"{done:10} {args.output}")
    if _write_picture(args.plot, answer):
        print(f"written    {args.plot}")


def _exit_code(answer: "_Answer") -> int:
    """Return 0 if the run fits, or with --ranks if any layout does; else NOTHING_FITS."""
    if answer.search_result:
        return 0 if answer.search_result.layouts else NOTHING_FITS
    fits = answer.planned is not None
    if answer.planned:
        fits = answer.target.verdict(answer.planned.total) != "does not fit"
    return 0 if fits else NOTHING_FITS


def _find_speeds(
    config: RunConfig, target: DeviceTarget, args: argparse.Namespace
) -> tuple[DeviceTarget, Assumptions | None, list[str]]:
    """Return the device and the speeds that the plan rests on, None if they are not known, and
    notes on both: of the data sheet, then of --calibrated, then by the factor of --measured."""
    assumed = _assumptions(config, target, args)
    _require_speeds(config, assumed, args)
    notes = [*_notes(config, target, args.calibrated is not None)]
    if args.calibrated:
        target = replace(target, process=read_calibration(args.calibrated).process)
        assumed, of_file = _from_calibration(config, target, assumed, args)
        notes += of_file
    if args.measured and assumed:
        assumed, note = _corrected(assumed, config, target, args)
        notes.append(note)
    return target, assumed, notes


def _require_speeds(
    config: RunConfig, assumed: Assumptions | None, args: argparse.Namespace
) -> None:
    """Raise UserError if options need speeds that are not known."""
    if args.ranks and config.fp8.four_bits:
        raise UserError.of("planning.nvfp4_times", advice="leave --ranks out")
    if args.ranks and assumed is None:
        raise UserError.of("command.peak_unknown")
    if args.plot and assumed is None:
        raise UserError.of("planning.plot_speeds", path=args.plot)


def _plan_own_layout(
    config: RunConfig, target: DeviceTarget, assumed: Assumptions | None, args: argparse.Namespace
) -> Planned | None:
    """Return the run in its own layout, as it would be started; None if its state alone does not
    fit and others are searched. Raises UserError if it is to be drawn then."""
    if not (args.ranks and _is_beyond(config, target)):
        return plan_run(config, MemoryModel(target.device, target.process), assumed)
    if args.plot:
        raise UserError.of("planning.plot_beyond", path=args.plot)
    return None


def _write_picture(path: Path | None, answer: "_Answer") -> bool:
    """Write the picture of the run in its own layout, if there is a path for it. Return True if it
    was written."""
    planned = answer.planned
    if path is None or planned is None:
        return False
    assert planned.prediction is not None  # `main` has asked for speeds
    assert answer.assumed is not None
    draw_plan(planned, planned.prediction, answer.target, answer.assumed).save(path)
    return True


@dataclass(frozen=True)
class _Answer:
    """All that a plan says.

    planned: the run in its own layout; None if its state alone does not fit, and layouts of other
        ranks are searched.
    assumed: None if the device's peak speed is not known.
    search_result: None without --ranks.
    shared_target, shared_speeds: the device and the speeds of each of --ranks.
    """

    config: RunConfig
    planned: Planned | None
    target: DeviceTarget
    assumed: Assumptions | None
    search_result: LayoutSearch | None
    shared_target: DeviceTarget
    shared_speeds: Assumptions | None


def _is_beyond(config: RunConfig, target: DeviceTarget) -> bool:
    """Return True if a run does not fit in its own layout by what its state takes at least.

    A run file without [parallel] says nothing of its layout: such a model on one rank is not worth
    the minutes in which all of its layers are built.
    """
    return target.verdict(least_of_mean_rank(config)) == "does not fit"


def _lines_of_own_layout(answer: _Answer, budget: float | None) -> Iterator[str]:
    """Yield the lines on bytes and time of the run in its own layout. budget: rank-hours."""
    planned = answer.planned
    target = answer.target
    assumed = answer.assumed
    if planned is None:
        yield beyond_line(answer.config, target)
        return
    yield from memory_lines(planned, target)
    if target.verdict(planned.total) == "does not fit":
        yield from remedy_lines(planned, cheapest_remedy(planned.config, target, assumed))
    yield ""
    yield from _prediction(planned, assumed)
    if budget and planned.prediction and assumed:
        yield budget_line(planned, planned.prediction, assumed, budget)


def _lines_of_layouts(answer: _Answer, args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines on the layouts of --ranks, if any were searched."""
    found = answer.search_result
    speeds = answer.shared_speeds
    if found is None or speeds is None:
        return
    yield ""
    yield from layout_lines(found, args.ranks, answer.shared_target, speeds)
    if answer.planned is None and args.budget:
        yield from _budget_of_best(found, speeds, args.budget)


def _budget_of_best(
    search_result: LayoutSearch, assumed: Assumptions, budget: float
) -> Iterator[str]:
    """Yield what a budget of rank-hours buys in the fastest layout that was found, if any was."""
    if search_result.layouts:
        best = search_result.layouts[0]
        assert best.prediction is not None  # layouts are searched with a peak speed
        yield budget_line(best, best.prediction, assumed, budget)


def _prediction(planned: Planned, assumed: Assumptions | None) -> list[str]:
    """Return the lines on the predicted step, or one that says why there are none."""
    if planned.prediction and assumed:
        return [*prediction_lines(planned, planned.prediction, assumed)]
    if planned.config.fp8.four_bits:
        return ["prediction not known: products in NVFP4 are emulated"]
    return ["prediction not known: the peak speed of the device is not; --gpu or --tflops says it"]


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that do not fit."""
    problems = [*_speed_problems(args)]
    if args.efficiency is not None and not 0 < args.efficiency <= 1:
        problems.append(f"--efficiency {args.efficiency:g}: give a fraction above 0, at most 1")
    # 0 is no number of ranks, and None is no --ranks
    if args.ranks is not None and not 0 < args.ranks <= MAX_RANKS:
        problems.append(f"--ranks {args.ranks}: give a number from 1 to {MAX_RANKS:,}")
    if args.budget is not None and not 0 < args.budget < 1e12:
        problems.append(f"--budget {args.budget:g}: give a number of rank-hours above 0")
    if args.machine is not None and args.machine < 1:
        problems.append(f"--machine {args.machine}: give a number from 1 on")
    if args.output:
        problems += _output_problems(args)
    if problems:
        raise UserError(*problems)
    if args.plot:
        require_picture_path(args.plot, suffixes=(".svg", ".png"))


def _speed_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of the speeds of the device and its links."""
    speeds = {"--tflops": args.tflops, "--fast-link": args.fast_link, "--slow-link": args.slow_link}
    for name, value in speeds.items():
        if value is not None and not 0 < value < 1e9:
            yield f"{name} {value:g}: give a number above 0"


def _output_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of the file --output."""
    path = args.output
    if not args.ranks:
        yield f"--output {path}: the best of which layouts? give --ranks N"
    if path.resolve() == Path(args.file).resolve():
        yield f"--output {path}: it is the run file itself; give another"
    elif os.path.lexists(path) and not _was_written_by_plan(path):
        yield (
            f"--output {path}: it exists, and `megaprec plan` did not write it: give another name"
        )


def _notes(config: RunConfig, target: DeviceTarget, calibrated: bool) -> Iterator[str]:
    """Yield a line for each thing that the prediction takes for granted. calibrated: the device was
    measured."""
    yield from _overruled_preset(config)
    if not config.model.vocab:
        yield (
            "model.vocab is left to the tokenizer: planned for data.vocab_size = "
            f"{config.data.vocab_size:,} tokens"
        )
    if target.device == "cpu":
        yield from assumed_devices(config)
    elif config.train.device == "cpu":
        yield 'train.device = "cpu" is left aside: --gpu and --gpu-memory plan for a GPU'
    if not target.gpu and not calibrated and not config.fp8.four_bits:
        yield (
            "only products and messages are timed: what else this device needs is not known; --gpu "
            "NAME plans for a GPU that is"
        )
    if config.fp8.kind not in ("none", "nvfp4") and not (target.gpu and target.gpu.fp8):
        yield (
            "the peak of FP8 is not known: its products are timed as those of "
            f"{config.precision.compute}; the bytes are those of FP8"
        )
    if config.optimizer.frozen:
        yield (
            "optimizer.frozen: times are those of a run that trains all parameters; gradients of "
            "frozen weights take none, so steps are no slower"
        )
    if config.canonical_shards:
        yield (
            'times are those of train.numerics = "fast"; canonical sums take longer '
            "(docs/canonical.md)"
        )
    if config.model.experts:
        yield (
            "experts are taken to get as many tokens each; the router decides, and activations "
            "may be larger"
        )


def _overruled_preset(config: RunConfig) -> Iterator[str]:
    """Yield a line on the keys that the file or the command line give another value than the
    preset."""
    origins = {config.origin(f"model.{name}") for name, _ in config.model}
    presets = [name for name in PRESETS if f"preset {name}" in origins]
    for preset in presets:
        changed: list[str] = []
        for name in PRESETS[preset]:
            key = f"model.{name}"
            is_overruled = config.origin(key) != f"preset {preset}"
            if is_overruled and config.get(key) != getattr(_of_preset(preset), name):
                changed.append(f"{key} = {config.value(key)} ({config.origin(key)})")
        if changed:
            yield f"model.preset {preset} is overruled by {', '.join(changed)}"


def _of_preset(preset: str) -> ModelConfig:
    """Return the model of a preset as it is."""
    return ModelConfig(**PRESETS[preset])


def _assumptions(
    config: RunConfig, target: DeviceTarget, args: argparse.Namespace
) -> Assumptions | None:
    """Return what the prediction rests on; None if the device's peak of FLOP/s is not known, or
    products are emulated, as those of four bits are."""
    if config.fp8.four_bits:
        return None
    known = assumptions_of(target.gpu, config.plan) if target.gpu else None
    if known is None:
        known = _assumptions_of_others(config, target, args.tflops)
    if known is None:
        return None
    return _with_given_speeds(known, args)


def _with_given_speeds(known: Assumptions, args: argparse.Namespace) -> Assumptions:
    """Return the assumptions with the speeds that the command line gives."""
    given = {
        "efficiency": args.efficiency,
        "fast": args.fast_link,
        "slow": args.slow_link,
        "machine": args.machine,
    }
    if args.tflops:
        # FP8 is as much faster as on the data sheet
        faster = args.tflops / known.tflops
        given |= {"tflops": args.tflops, "fp8_tflops": faster * known.fp8_tflops}
    return replace(known, **{name: value for name, value in given.items() if value is not None})


def _assumptions_of_others(
    config: RunConfig, target: DeviceTarget, tflops: float | None
) -> Assumptions | None:
    """Return what a prediction rests on for a device without a data sheet; None if its peak of
    FLOP/s is not known."""
    peak = tflops or 0.0
    if not peak and target.device == "cpu":
        # the ranks of a run on CPUs share this machine
        peak = _measure_tflops(config) / config.world_size
    if not peak:
        return None
    link = CPU_LINK if target.device == "cpu" else GPU_LINK
    return Assumptions(peak, OTHER, link, SLOW_LINK, MACHINE, target.device)


def _from_calibration(
    config: RunConfig, target: DeviceTarget, known: Assumptions | None, args: argparse.Namespace
) -> tuple[Assumptions | None, list[str]]:
    """Return the assumptions with the speeds of --calibrated, and notes on that file.

    Speeds that the command line gives stay. Raises UserError for a file of another kind of device.
    """
    path = args.calibrated
    calibration = read_calibration(path)
    if calibration.device != target.device:
        raise UserError.of(
            "planning.calibration_device",
            path=path,
            measured=calibration.device,
            device=target.device,
        )
    words = [f"speeds are those of {path}, measured on {calibration.date}"]
    if differing := [*differences(calibration, target.device)]:
        words.append(f"on another machine: {'; '.join(differing)}")
    if known is None:
        return None, [*words, "and left aside: the peak of the device is not known"]
    speeds = calibrated(config, calibration, known)
    if speeds.missing:
        words.append(f"not tried, so of the table: {', '.join(speeds.missing)}")
    if args.measured:
        words.append("--measured corrects all of them by one factor")
    return _with_given_speeds(speeds.assumed, args), ["; ".join(words)]


def _corrected(
    assumed: Assumptions, config: RunConfig, target: DeviceTarget, args: argparse.Namespace
) -> tuple[Assumptions, str]:
    """Return the assumptions with the factor of a measured run, and a note that says it."""
    run = read_measured(args.measured)
    require_builtin(run.config.model, "megaprec plan --measured")

    def predicted(measured: RunConfig) -> float:
        """Return the seconds of a step of the run, predicted with the same assumptions."""
        speeds: Assumptions | None = assumed
        if args.calibrated:
            speeds, _ = _from_calibration(measured, target, assumed, args)
        elif target.device == "cpu":
            # the ranks of that run shared the same machine
            share = config.world_size / measured.world_size
            speeds = replace(assumed, tflops=share * assumed.tflops)
        memory = MemoryModel(target.device, target.process)
        planned = plan_run(measured.on_device(target.device), memory, speeds)
        assert planned.prediction is not None  # with a peak speed
        return planned.prediction.seconds

    factor = factor_of(run, predicted)
    note = (
        f"times are corrected by {factor:.3g}, from {run.steps} steps of {run.folder} (median "
        f"{duration(run.seconds)}), which is taken to have run on such devices"
    )
    return replace(assumed, factor=factor), note


def _require_layouts(search_result: LayoutSearch, ranks: int) -> None:
    """Raise UserError if no number of ranks such as this one has a layout, whatever its memory."""
    if not search_result.layouts and not search_result.too_large:
        reason = none_found(search_result, ranks)
        raise UserError.of("planning.no_layout", reason=reason)


def _share_of_ranks(
    config: RunConfig, target: DeviceTarget, assumed: Assumptions | None, args: argparse.Namespace
) -> tuple[DeviceTarget, Assumptions | None]:
    """Return the device and the speeds of one of --ranks. A GPU is of one rank; the CPUs of this
    machine are shared by all of --ranks, not by the ranks of the run's own layout."""
    if not args.ranks or not assumed or target.device != "cpu":
        return target, assumed
    if args.calibrated:
        # what was measured is of as many ranks as cores; more ranks wait for each other
        crowd = max(1.0, args.ranks / cores())
        shared = replace(target_of(config, ranks=args.ranks), process=target.process)
        return shared, replace(assumed, crowd=crowd)
    share_of_machine = assumed.tflops * config.world_size / args.ranks
    tflops = args.tflops or share_of_machine
    return target_of(config, ranks=args.ranks), replace(assumed, tflops=tflops)


def _measure_tflops(config: RunConfig, side: int = 512, duration: float = 0.2) -> float:
    """Return the TFLOP/s of this machine's CPU: of the fastest of some square products on one
    thread, times its cores.

    The fastest of short products says least about other work that the machine has. side: of the
    matrices. duration: seconds.
    """
    # in the run's dtype: some CPUs are many times slower in bf16 or fp16
    matrix = torch.ones(side, side, dtype=config.plan.compute)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    product(matrix, matrix)  # the first takes longer
    end = time.perf_counter() + duration
    fastest = math.inf
    while (start := time.perf_counter()) < end:
        product(matrix, matrix)
        fastest = min(fastest, time.perf_counter() - start)
    # other work of this process may use them
    torch.set_num_threads(threads)
    return 2 * side**3 / fastest / 1e12 * cores()


def _show_progress(done: int, total: int, best: Planned | None) -> None:
    """Show on a terminal how many layouts are done, and the fastest so far. Elsewhere print one
    line before the first is planned."""
    if not sys.stderr.isatty():
        if done == 0:
            print(f"planning   {total:,} layouts", file=sys.stderr, flush=True)
        return
    text = f"planning   layout {done:,} of {total:,}"
    if best and best.prediction:
        text += f"; best {in_words(best.config.parallel)}: {duration(best.prediction.seconds)}"
    # the last text erases the line
    if done == total:
        text = ""
    print(f"\r{text[:LINE]:<{LINE}}\r", end="", file=sys.stderr, flush=True)


def _was_written_by_plan(path: Path) -> bool:
    """Return True if this command has written a file."""
    first_words = COMMENT.partition("{")[0]
    return path.is_file() and read_whole(path).startswith(first_words.encode())


def _write_best(path: Path, ranks: int, search_result: LayoutSearch) -> None:
    """Write the run in the first layout."""
    # they are sorted, the fastest first
    best = search_result.layouts[0].config
    write_whole(path, best.as_toml(COMMENT.format(ranks=f"{ranks:,}")).encode())


def _document(answer: _Answer) -> dict[str, Any]:
    """Return all that is known, for JSON."""
    target = answer.target
    assumed = answer.assumed
    search_result = answer.search_result
    own_layout = beyond_as_data(answer.config)
    if answer.planned:
        own_layout = as_data(answer.planned, target, assumed)
    document: dict[str, Any] = {
        "device": target.name,
        "memory": target.memory,
        "usable": target.usable,
        **own_layout,
        "assumed": _known_speeds(assumed) if assumed else None,
    }
    if search_result:
        document["layouts"] = [
            as_data(planned, answer.shared_target, answer.shared_speeds)
            for planned in search_result.layouts
        ]
        document |= {
            "slower": search_result.slower,
            "too_large": search_result.too_large,
            "unseen": search_result.unseen,
        }
    return document


def _known_speeds(assumed: Assumptions) -> dict[str, Any]:
    """Return what a prediction rests on, for JSON, which has no infinity."""
    speeds = asdict(assumed)
    if math.isinf(assumed.bandwidth):
        speeds["bandwidth"] = None
    return speeds
