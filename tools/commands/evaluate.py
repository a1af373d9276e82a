"""`megaprec evaluate MODEL --data PATH`: loss, perplexity and bits per byte of a model on texts;
`megaprec evaluate RUN_DIR`: the verdict on a run's own held-out text, as its evaluations have it.

MODEL is a run folder, a checkpoint of any layout, a Hugging Face folder, or a folder of any other
format that megaprec reads. Each document is evaluated alone, as docs/evaluation.md says. The loss
is the mean over all tokens of the text, in nats; perplexity its exponential; bits per byte the sum
in bits over the bytes of the text in UTF-8. It runs on one process, or on local ranks that share
the model with --tensor and --pipeline; of ranks that torchrun starts, further ones are replicas,
which share the texts. A rank computes on a CUDA device of its own where there is one.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.precision.gemm import fp32_sums
from megaprec.text.forms import UTF8
from megaprec.text.tokenizer import has_built
from megaprec.tokens.copies import is_there
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import read_record
from megaprec.tokens.places import is_remote, is_url, path_of
from megaprec.url_secrets import masked
from models.attention.backends import gpu_kernels
from models.decoder.stages import Stage
from models.engine.relay import Relay
from parallel.described_world import is_rank_of_world
from parallel.mesh import make_mesh, world
from tools.analysis.verdict.verdict import fields, lines, read_verdict
from tools.commands.options import (
    add_device,
    add_ema,
    checkpoints_elsewhere,
    device_of_option,
    run_or_model_place,
)
from tools.commands.text_options import add_text_options, text_options, tokenizer_path
from tools.console.json_output import add_json, print_result
from tools.console.progress_bar import tokens_progress
from tools.console.tables import print_table
from tools.console.units import enumerated
from tools.inference.evaluation import Score, score
from tools.inference.load import DescribedModel, describe_model, load_model
from tools.inference.windows import TokenizedDocument, read_documents
from tools.journal.records import no_run, odd_records
from tools.training.launch import run_local
from tools.training.stopping import note_failure

MAX_LOCAL_RANKS = 1024
COMPUTE = ("fp32", "bf16", "fp64")
# options that have an effect with --data alone -> the default
OPTIONS_OF_TEXTS = {
    "window": None,
    "stride": None,
    "compute": COMPUTE[0],
    "ema": False,
    "text_field": "text",
    "encoding": UTF8,
    "exclude": [],
    "max_chars": None,
    "tokenizer": None,
    "tensor": 1,
    "pipeline": 1,
    "device": "auto",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    parser.description = __doc__
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=run_or_model_place,
        help="run folder, checkpoint, also at a URL, or Hugging Face folder",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="text file, folder, .jsonl, .parquet, or common prefix of a .bin and .idx pair; may "
        "be given several times; without it: a run folder's own held-out text, as it was evaluated "
        "during training",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens that a prediction sees at most (default: model.max_positions)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens of a long document that each window after the first predicts; fewer give each "
        "more context and take longer (default: --window)",
    )
    parser.add_argument(
        "--compute", choices=COMPUTE, default=COMPUTE[0], help="precision (default: fp32)"
    )
    add_ema(parser, "evaluate")
    add_text_options(parser)
    parser.add_argument(
        "--max-chars", type=int, metavar="N", help="characters of each text to read (default: all)"
    )
    parser.add_argument(
        "--tokenizer", type=tokenizer_path, metavar="FILE", help="tokenizer, if MODEL has none"
    )
    for axis, purpose in (
        ("tensor", "share the layers"),
        ("pipeline", "have the layers one after the other"),
    ):
        parser.add_argument(
            f"--{axis}",
            type=int,
            default=1,
            metavar="N",
            help=f"ranks that {purpose}, for a large model (default: 1)",
        )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec evaluate`: alone, on local ranks that it starts, or as one of ranks that are
    started."""
    if not args.data:
        _require_no_options_of_texts(args)
        return _tell_verdict(args)
    sizes = _layout(args)
    problems = [f"--{axis} {size}: give 1 or more" for axis, size in sizes.items() if size < 1]
    if problems:
        raise UserError(*problems)
    replica_ranks = args.tensor * args.pipeline  # that hold the model once
    if not is_rank_of_world():
        if replica_ranks > MAX_LOCAL_RANKS:
            raise UserError.of(
                "command.too_many_local_ranks",
                tensor=args.tensor,
                pipeline=args.pipeline,
                max_local_ranks=MAX_LOCAL_RANKS,
            )
        device = device_of_option(args.device, ranks=replica_ranks)
        if replica_ranks == 1:
            return _evaluate(args, None, device)
        _require_ready(args)
        run_local(_rank_command(args), replica_ranks)
        return 0
    device = device_of_option(args.device, ranks=replica_ranks)
    # ranks beyond one replica share the texts
    with world(device, failed=note_failure):
        ranks = dist.get_world_size()
        if ranks % replica_ranks:
            raise UserError.of(
                "command.ranks_multiple",
                ranks=ranks,
                tensor=args.tensor,
                pipeline=args.pipeline,
                replica=replica_ranks,
            )
        replicas = ranks // replica_ranks
        mesh = make_mesh(pp=args.pipeline, dp=replicas, tp=args.tensor, device=device)
        return _evaluate(args, mesh, device)


def _require_no_options_of_texts(args: argparse.Namespace) -> None:
    """Raise UserError for options that say how texts are read and scored: a verdict is on losses
    that the run has written."""
    for name, default in OPTIONS_OF_TEXTS.items():
        if getattr(args, name) != default:
            option = "--" + name.replace("_", "-")
            raise UserError.of("command.option_without_data", option=option, model=args.model)


def _tell_verdict(args: argparse.Namespace) -> int:
    """Print the verdict on a run. Raises UserError if the folder has no held-out loss."""
    is_elsewhere = is_remote(args.model)
    if not is_elsewhere and not args.model.is_dir():
        raise UserError(no_run(args.model))
    verdict = None if is_elsewhere else read_verdict(args.model)
    if verdict is None:
        raise UserError.of("command.no_held_out_loss", model=args.model)
    notes = odd_records(args.model)
    shown = [*(f"note       {note}" for note in notes), *lines(verdict)]
    return print_result(
        args,
        lambda: {"run": str(args.model), **fields(verdict), "notes": notes},
        lambda: print("\n".join(shown)),
    )


def _layout(args: argparse.Namespace) -> dict[str, int]:
    return {"tensor": args.tensor, "pipeline": args.pipeline}


def _require_ready(args: argparse.Namespace) -> None:
    """Raise UserError for what ranks would find before they read weights."""
    sets = _named_sets(args.data)
    place = checkpoints_elsewhere(args.model)
    model = describe_model(place, args.tokenizer, args.ema, args.tensor, args.pipeline)
    _window(args, model.config.max_positions)
    _open_sets(args, sets, model)


def _rank_command(args: argparse.Namespace) -> list[str]:
    """Return the command line of a rank."""
    values = {
        **_layout(args),
        "device": device_of_option(args.device, args.tensor * args.pipeline),
        "window": args.window,
        "stride": args.stride,
        "compute": args.compute,
        "text-field": args.text_field,
        "encoding": args.encoding,
        "max-chars": args.max_chars,
        "tokenizer": args.tokenizer,
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += [f"--data={source}" for source in args.data]
    options += [f"--exclude={pattern}" for pattern in args.exclude]
    for switch in ("ema", "json"):
        if getattr(args, switch):
            options.append(f"--{switch}")
    # a model may have a name that begins with a dash
    return ["evaluate", *options, "--", str(args.model)]


def _evaluate(args: argparse.Namespace, mesh: DeviceMesh | None, device: str) -> int:
    """Score all sets on the ranks of `mesh` and print the scores on the first of them.

    device: type of the ranks' devices.
    """
    with gpu_kernels(device), fp32_sums():
        return _evaluate_sets(args, mesh, torch.device(device))


def _evaluate_sets(args: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device) -> int:
    """Score all sets, print the scores and notes on rank 0, and return the exit code, 0.
    Collective over the world."""
    sets = _named_sets(args.data)
    is_first = Axis.world(mesh).rank == 0
    place = checkpoints_elsewhere(args.model)
    model = load_model(place, Stage, args.compute, args.tokenizer, mesh, args.ema, device)
    # passes samples through the pipeline's stages, and shares them out to replicas
    relay = Relay.over(mesh, model.stage)
    window, stride = _window(args, model.config.max_positions)
    # all sets are opened before the first is scored, which may take hours
    documents_by_set = _open_sets(args, sets, model)
    # all ranks take part in each set, in the same order
    scores = dict[str, Score]()
    for name, documents in documents_by_set.items():
        progress = nullcontext(_ignore_progress)
        if is_first:
            progress = tokens_progress(f"evaluating {name}")
        with progress as report:
            scores[name] = score(relay, documents, model.begin, window, stride, report)
        if not scores[name].tokens:
            raise UserError.of("command.nothing_to_predict", data_sets=sets[name])
    if not is_first:
        return 0
    for note in _notes(model, sets, args.text_field):
        print(f"note: {note}", file=sys.stderr)
    document = {
        "model": str(args.model),
        "ema": args.ema,
        "window": window,
        "stride": stride,
        "compute": args.compute,
        "begin_token": model.begin,
        "sets": [
            {"name": name, "source": masked(sets[name]), **_score_fields(of_set)}
            for name, of_set in scores.items()
        ],
    }
    return print_result(args, lambda: document, lambda: _show(scores))


def _open_sets(
    args: argparse.Namespace, sets: dict[str, str], model: DescribedModel
) -> dict[str, Iterable[TokenizedDocument]]:
    """Return the documents of each set, by its name. Raises UserError for a set that is not
    there."""
    options = text_options(args, max_chars=args.max_chars)
    return {name: read_documents(path, model, options) for name, path in sets.items()}


def _show(scores: dict[str, Score]) -> None:
    print_table(_table(scores))
    losses = [f"{scored.frequency_loss:.4f} of {name}" for name, scored in scores.items()]
    print(
        f"yardstick  loss of a model that knows only how often each token occurs in the text: "
        f"{enumerated(losses)}"
    )


def _ignore_progress(tokens: int) -> None:
    """Show no progress: the first rank does."""


def _named_sets(options: list[str]) -> dict[str, str]:
    """Return the paths of the sets by name. Raises UserError if two sets have one name.

    options: the values of --data, [NAME=]PATH each.
    """
    sets = dict[str, str]()
    for option in options:
        name, equals, path = option.partition("=")
        # a path may have an equals sign of its own
        if not equals or not name or is_url(name) or Path(option).exists():
            name = masked(option)
            path = option
        if name in sets:
            raise UserError.of("command.set_name_twice", option=option, name=name)
        if not path:
            raise UserError.of("command.set_path_missing", option=option, name=name)
        sets[name] = path
    return sets


def _window(args: argparse.Namespace, positions: int) -> tuple[int, int]:
    """Return window and stride in tokens. Raises UserError if the model has fewer `positions`, or
    if the stride is longer than the window."""
    # as much context as the model has positions
    window = positions if args.window is None else args.window
    stride = window if args.stride is None else args.stride
    if not 1 <= window <= positions:
        raise UserError.of("command.window_range", window=window, positions=positions)
    if not 1 <= stride <= window:
        raise UserError.of("command.stride_range", stride=stride, window=window)
    return window, stride


def _notes(model: DescribedModel, sets: dict[str, str], text_field: str) -> Iterator[str]:
    """Yield the lines on what the user may not expect of the scores."""
    yield from model.notes
    tokenized = [path for path in sets.values() if is_there(path_of(path), ".idx")]
    if text_field != "text" and len(tokenized) == len(sets):
        yield f"--text-field {text_field} has no effect: all that is evaluated is tokens already"
    for path in tokenized:
        if IndexedDataset(path_of(path)).has_mask:
            yield f"{path} has a loss mask: its answers alone are scored, and their bytes not known"
    if model.begin is None:
        yield (
            "the model has no token to begin a document with: the first token of each document is "
            "not predicted, and its bytes are not counted"
        )
    for path in tokenized:
        dataset = IndexedDataset(path_of(path))
        yield from dataset.notes
        if not dataset.has_mask:
            yield from _byte_notes(model, path)


def _byte_notes(model: DescribedModel, path: str) -> Iterator[str]:
    """Yield the lines on the bytes of a data set's text, on which bits per byte rest."""
    record = read_record(path_of(path))
    has_bytes = record is not None and "bytes" in record
    if model.tokenizer is None:
        if not has_bytes:
            yield f"{path}: without a tokenizer the bytes of the text are not known"
        return
    if not has_bytes:
        yield (
            f"{path}: bytes are those of the decoded tokens, for no build has recorded those of "
            "the text"
        )
    # None: the file is another one, and it is not known whether its tokens mean the same
    is_of_build = has_built(model.tokenizer, record) if record else True
    if is_of_build is None:
        yield (
            f"{path} was built with another file than {model.tokenizer.path}: their tokens must "
            "mean the same"
        )
    elif not is_of_build:
        yield (
            f"{path} was built with another tokenizer than {model.tokenizer.path}: equal ids mean "
            "other tokens"
        )


def _score_fields(scored: Score) -> dict[str, Any]:
    """Return a score for programs; losses in nats a token, null for what is not known."""
    return {
        "documents": scored.documents,
        "tokens": scored.tokens,
        "bytes": scored.size,
        "loss": scored.loss,
        "frequency_loss": scored.frequency_loss,
        "perplexity": scored.perplexity,
        "bits_per_byte": scored.bits_per_byte,
    }


def _table(scores: dict[str, Score]) -> Table:
    """Return a table with a row per set."""
    table = Table("data", box=box.SIMPLE_HEAD)
    for heading in ("documents", "tokens", "bytes", "loss", "perplexity", "bits/byte"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scored in scores.items():
        table.add_row(
            name,
            f"{scored.documents:,}",
            f"{scored.tokens:,}",
            "unknown" if scored.size is None else f"{scored.size:,}",
            f"{scored.loss:.4f}",
            f"{scored.perplexity:.4g}",
            "unknown" if scored.bits_per_byte is None else f"{scored.bits_per_byte:.4f}",
        )
    return table
