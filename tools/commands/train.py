"""`megaprec train RUN.toml [table.key=value ...]`: pretrain a model and leave a run folder.

Started by hand, the command checks all that can be checked beforehand, prepares the data and starts
local ranks. Started by torchrun, Slurm or itself, it is one rank of the world that it joins. The
run file is the same in both cases.
"""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.train_program import END_FILE
from models.config import require_builtin
from parallel.described_world import is_rank_of_world
from tools.commands.notes import moved_notes, tell_notes
from tools.commands.options import add_overrides, add_strict, new_folder
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.console.streams import spare_output
from tools.console.wrapped import say
from tools.parts import optional_parts
from tools.training.data_identity import ALLOW
from tools.training.elastic import Restarts
from tools.training.end_report import EndReport
from tools.training.rank import train_rank
from tools.training.run_folder import lock_folder
from tools.training.step_records import require_applied

SPELLED_OUT = {"train.seq_length": "seq_length"}  # by the key, as those of [model] are
SLOW_TO_BUILD = 1000  # feed-forwards; a model that has more takes seconds to build


class Allowable(tuple[str, ...]):
    """The differences that --allow accepts; of a text that names several, all must be among
    them."""

    __slots__ = ()

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and all(
            super(Allowable, self).__contains__(name) for name in differences_in(text)
        )


def differences_in(text: str) -> list[str]:
    """Return the differences that a value of --allow names, with commas between."""
    return [SPELLED_OUT.get(name, name) for name in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    parser.description = __doc__
    parser.add_argument(
        "file", metavar="RUN.toml", help="run file (`megaprec keys` lists its keys)"
    )
    add_overrides(parser)
    parser.add_argument(
        "--export-hf",
        metavar="DIR",
        type=new_folder,
        help="after training, export the model to this folder in Hugging Face format",
    )
    parser.add_argument(
        "--export-ema",
        action="store_true",
        help="let --export-hf export the moving average of the weights (optimizer.ema)",
    )
    add_strict(parser)
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=Allowable(ALLOW),
        help=(
            "train although this differs from the checkpoint or the first weights; may be given "
            "several times, or several with commas between"
        ),
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help=(
            "skip the comparison with transformers of the model of train.init_from and of "
            "--export-hf"
        ),
    )
    # of `megaprec.train`
    parser.add_argument(END_FILE, type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec train`; return the exit code."""
    end_report = EndReport(args.end_file)
    with end_report.telling():
        return _run(args, end_report)


def _run(args: argparse.Namespace, end_report: EndReport) -> int:
    """Check all that can be checked, start ranks unless this is one, and train; return the exit
    code."""
    # A log that takes no more lines, such as that of a closed terminal, does not end a run.
    spare_output()
    allowed = [name for text in args.allow for name in differences_in(text)]
    config = resolve_run(args.file, args.overrides)
    end_report.config = config
    export: Path | None = args.export_hf
    tell_notes([*config.notes, *moved_notes(args.file, config)], args.strict)
    tell_notes(optional_parts.untested(), strict=False)
    # a rank of a world that torchrun, Slurm or `launch_local` below has started
    if is_rank_of_world():
        return _train(config, export, args.export_ema, allowed, not args.no_verify)

    _require_export(config, export, args.export_ema)
    optional_parts.open_checked(config, allowed)
    optional_parts.print_plan(config)
    _warn_of_slow_build(config)
    # before ranks are started, so that a difference costs no start
    if not args.no_verify:
        optional_parts.verify_models(config, export)

    if config.world_size == 1:
        return _train(config, export, args.export_ema, allowed, verify=False)
    restarts = Restarts(config, lambda: lock_folder(config))
    command = ["train", args.file, *args.overrides, *_options_of_ranks(args, allowed)]
    on_lost_rank = end_report.noting(restarts.ranks_after)
    return optional_parts.launch_local(
        command, config.world_size, config.train.threads, on_lost_rank
    )


def _warn_of_slow_build(config: RunConfig) -> None:
    """Say on stderr that a model of very many blocks takes a while to build."""
    blocks = config.model.layers * max(1, config.model.experts)
    if blocks > SLOW_TO_BUILD:
        print(
            f"building a model of {blocks:,} feed-forwards, which takes a while",
            file=sys.stderr,
            flush=True,
        )


def _options_of_ranks(args: argparse.Namespace, allowed: Collection[str]) -> list[str]:
    """Return the options with which local ranks are started."""
    # they need not verify again
    options = ["--no-verify", *(f"--allow={difference}" for difference in allowed)]
    if args.export_hf:
        options += ["--export-hf", str(args.export_hf)]
    if args.export_ema:
        options.append("--export-ema")
    return options


def _require_export(config: RunConfig, export: Path | None, export_ema: bool) -> None:
    """Raise UserError, before hours of training, for an export that would not be possible."""
    if export_ema and export is None:
        raise UserError.of("command.export_ema_alone")
    if export_ema and not config.optimizer.ema:
        raise UserError.of("command.export_no_ema")
    if export:
        require_builtin(config.model, "--export-hf")
    if export and export.exists():
        raise UserError.of("command.export_exists", export=export)


def _train(
    config: RunConfig,
    export_folder: Path | None,
    export_ema: bool,
    allowed: Collection[str],
    verify: bool,
) -> int:
    """Train as one rank; the first also leaves samples, plots and the export. Return the exit
    code.

    export_ema: the average of the weights is exported.
    """
    trainer = train_rank(config, export_folder, allowed, verify)
    if trainer is None:
        return 0
    # Outside of the world, whose other ranks need not wait for plots and export.
    config = trainer.config
    optional_parts.print_skipped(config, trainer.progress)
    optional_parts.write_yardsticks(config, trainer.corpus)
    folder = Path(config.train.folder)
    if config.checkpoint.export == "hf":
        _complete_exports(config)
    plots = _write_plots(config) if config.log.plot else []
    optional_parts.print_outcome(config, plots, trainer.progress.step)
    for line in optional_parts.verdict_lines(folder):
        say(line)
    if export_folder:
        optional_parts.export_run(config.checkpoint_folder, export_folder, export_ema)
    require_applied(trainer.progress, trainer.monitor)
    return 0


def _complete_exports(config: RunConfig) -> None:
    """Write the exports of checkpoints that a kill has interrupted, or say why not."""
    for warning in optional_parts.export_kept(config.checkpoint_folder):
        print(f"warning    {warning}", file=sys.stderr, flush=True)


def _write_plots(config: RunConfig) -> list[Path]:
    """Write the plots of the run and return their paths; none, with a warning, if they cannot be
    written."""
    folder = Path(config.train.folder)
    try:
        plots = [optional_parts.plot_run(folder, config.log.plot_over)]
        plots.append(optional_parts.plot_shadow(folder, config.fp8))
    except OSError as error:
        # a run that has trained is not lost for a picture
        print(f"warning    no plot: {file_error(error)}", file=sys.stderr, flush=True)
        return []
    return [plot for plot in plots if plot is not None]
