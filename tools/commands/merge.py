"""`megaprec merge A B C -o OUT`: the weighted mean of the weights of several checkpoints.

The checkpoints are folders in any formats that `megaprec convert` reads, saved in any layouts, of
one model and one tokenizer, in the order of their training. --average or --weights says what each
counts for. OUT has weights alone, and is read by evaluate, generate, convert and train.init_from.

The mean is taken in FP64 and rounded once. About one tensor is in memory. If it is interrupted, the
same command resumes it. OUT appears when it is complete.
"""

import argparse
import os

from megaprec.errors import UserError
from tools.commands.convert import DTYPES, write_model
from tools.commands.options import add_vocab, model_place, new_folder
from tools.convert.averages import described, given_weights, weights_of_average
from tools.convert.core.source import Source
from tools.convert.formats import TARGETS, check_vocab, format_of, open_intact
from tools.convert.merge import merge
from tools.training.machine import keep_freed_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `merge`."""
    parser.description = __doc__
    parser.add_argument(
        "sources",
        metavar="A",
        nargs="+",
        type=model_place,
        help="folders or URLs of checkpoints, the oldest first, in any formats",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=new_folder,
        required=True,
        help="folder to write; it must not exist",
    )
    shares = parser.add_mutually_exclusive_group()
    shares.add_argument(
        "--average",
        default="uniform",
        metavar="NAME",
        help=(
            "uniform (default): all count the same; linear, sqrt: as a linear or a 1 - sqrt tail "
            "of the learning rate would end, which for linear is uniform too; ema:B: an "
            "exponential moving average, such as ema:0.9"
        ),
    )
    shares.add_argument(
        "--weights",
        metavar="W,W,...",
        help="weight of each checkpoint in the mean, such as 0.2,0.3,0.5; they sum to 1",
    )
    parser.add_argument(
        "--to",
        choices=TARGETS,
        help="format of OUT (default: that of A if it is one of these, otherwise megaprec); "
        "megatron is written for one rank",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights in OUT (default: that of A)"
    )
    add_vocab(parser)
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="do not read the optimizer state of Megatron checkpoints, which may hold FP32 weights",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="skip the comparison with transformers of a small model of config.json",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec merge`; return the exit code."""
    keep_freed_memory()
    count = len(args.sources)
    if count < 2:
        raise UserError.of("convert.merge_one", path=args.sources[0])
    if args.weights is None:
        weights = weights_of_average(args.average, count)
    else:
        weights = given_weights(args.weights, count)
    # Before checkpoints are opened, which reads all of their bytes.
    if os.path.lexists(args.output):
        raise UserError.of("command.folder_exists", destination=args.output)
    source = merge(_open_all(args), weights, DTYPES.get(args.dtype))
    format_name = args.to or (source.kind if source.kind in TARGETS else "megaprec")
    for line in described(weights, [str(folder) for folder in source.folders]):
        print(line)
    write_model(source, format_name, args.output, DTYPES.get(args.dtype), verify=not args.no_verify)
    return 0


def _open_all(args: argparse.Namespace) -> list[Source]:
    """Return the checkpoints, opened."""
    check_vocab(args.vocab, *args.sources)
    kinds = list[str]()
    for folder in args.sources:
        kind, _ = format_of(folder)
        kinds.append(kind)
    sources = []
    for folder, kind in zip(args.sources, kinds, strict=True):
        # If none is Megatron's, opening says that the option has no use.
        weights_only = args.weights_only and (kind == "megatron" or "megatron" not in kinds)
        sources.append(open_intact(folder, args.vocab, weights_only))
    return sources
