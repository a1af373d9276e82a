"""`megaprec bisect A B`: find where two runs that ought to agree part: step, module, tensor, rank,
micro-batch.

A and B are run directories or run files. The first step is found in their records (digests.jsonl if
both have it, else metrics.jsonl). Then some steps are taken again, from a checkpoint that both have
or from the start, with activations between modules and gradients recorded. In one layout every bit
is compared; between layouts both runs are compared with one process in float64. Exit code 0: they
agree; 1: they part, with the place; 2: it could not be tried, or wrong input.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from parallel.described_world import is_rank_of_world
from tools.config.run_file import RunConfig
from tools.console.json_output import add_json, print_result
from tools.console.units import counted
from tools.console.wrapped import say
from tools.saved.train_state import read_progress
from tools.training.corpus import Corpus, open_corpus
from tools.verify.bisect.replay import (
    Replay,
    located_bits,
    located_in_float64,
    require_comparable,
)
from tools.verify.bisect.sides import (
    Records,
    Side,
    Start,
    common_start,
    compare_records,
    must_be_equal,
    other_keys,
    other_tokens,
)
from tools.verify.parity.certificate import NOT_TRIED, WRONG
from tools.verify.parity.ranks import RunFailed, with_vocabulary
from tools.verify.parity.record import Plan
from tools.verify.parity.runs import LayoutLimits, made_ready
from tools.verify.parity.summary import describe_difference
from tools.verify.prove.first_difference import LOADED

AGREE = "they agree"
PART = "they part"
UNTRIED = "not tried"
CODES = {AGREE: 0, PART: 1, UNTRIED: 2}
FORMAT = "megaprec bisect 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bisect`."""
    parser.description = __doc__
    parser.add_argument("a", metavar="A", help="run directory or run file")
    parser.add_argument(
        "b", metavar="B", help="run directory or run file that ought to agree with A"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=16,
        metavar="N",
        help="largest number of steps to take again (default: 16)",
    )
    parser.add_argument(
        "--replay", action="store_true", help="take steps again although the records agree"
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec bisect`; return the exit code."""
    if is_rank_of_world():
        raise UserError.of("command.launched")
    if args.steps < 1:
        raise UserError.of("command.steps", steps=args.steps)
    # a link to the same run is the same run
    if Path(args.a).exists() and Path(args.b).exists() and Path(args.a).samefile(args.b):
        raise UserError.of("command.same_run", a=args.a, b=args.b)
    first = Side.opened(args.a)
    second = Side.opened(args.b)
    require_comparable(first.config, second.config)
    for note in (*first.odd_records(), *second.odd_records()):
        _report_progress(f"note: {note}")
    document = bisect(first, second, args.steps, args.replay)
    print_result(args, lambda: document, lambda: show(document))
    return CODES[document["verdict"]]


def bisect(first: Side, second: Side, max_steps: int, replay_anyway: bool) -> dict[str, Any]:
    """Return the document: what the records say, what the replay says, and the verdict.

    first, second: the runs, with their records. max_steps: the most that are taken again.
    replay_anyway: take steps again also if the records agree.
    """
    exact = must_be_equal(first.config, second.config)
    records = compare_records(first, second, exact)
    document: dict[str, Any] = {
        "format": FORMAT,
        "a": first.name,
        "b": second.name,
        "compared": "bits" if exact else "float64",
        "keys": other_keys(first.config, second.config),
        "records": _records_fields(records),
        "replay": None,
    }
    if records.by and records.parting is None and not replay_anyway:
        return document | {"verdict": AGREE, "why": _agreement_reason(records, exact)}
    # the loaded state differs already: no step has to be taken again
    if records.parting and records.parting.loaded:
        reason = _loaded_state_reason(first, second, records.parting.step)
        return document | {"verdict": PART, "why": reason}
    replayed = _replay_steps(first, second, records, exact, max_steps)
    keys = [*document["keys"], *replayed.get("keys", [])]
    document |= replayed | {"keys": keys}
    # keys that differ are a likelier cause than a fault
    replay_entry = document["replay"]
    if keys and replay_entry and "likely_cause" in replay_entry:
        names = ", ".join(line.partition(":")[0] for line in keys)  # lines "key: values"
        cause = replay_entry["likely_cause"]
        replay_entry["likely_cause"] = f"the run files differ in {names}; else: {cause}"
    return document


def _loaded_state_reason(first: Side, second: Side, step: int) -> str:
    """Return why the runs part at a resume: the state that one of them loaded is not the state
    after step `step`, which both had."""
    reason = (
        f"until step {step} the runs agree, and then one went on from another state than they had"
    )
    # newest first: that of the step itself, if both runs have kept it and it differs
    differing = common_start(first, second, step + 1, exact=True).passed_over
    if differing and f"of step {step} " in differing[0]:
        return (
            f"{reason}: {differing[0]}: one was changed after it was saved, or not saved as it was"
        )
    return (
        f"{reason}: its checkpoint was changed or lacked something, or was not loaded as it was "
        "saved"
    )


def _records_fields(records: Records) -> dict[str, Any]:
    fields: dict[str, Any] = {"by": records.by, "steps": records.steps}
    if records.parting is not None:
        fields["first"] = records.parting.fields()
    return fields


def _agreement_reason(records: Records, exact: bool) -> str:
    """Return in words how far the records agree."""
    if not exact:
        extent = "losses and norms are close; --replay compares in float64"
    elif records.by == "digests":
        extent = "every bit is equal"
    else:
        extent = (
            "losses, norms and scales are the same bits; log.digests or --replay compare the "
            "whole state"
        )
    if records.beyond:
        extent += (
            f"; {counted(records.beyond, 'later step')} without a digest: losses, norms and "
            "scales are the same bits"
        )
    verb = "agrees" if records.steps == 1 else "agree"
    return f"{counted(records.steps, 'step')} of {records.by} {verb}: {extent}"


def _reason_against_replay(
    first: Side, second: Side, start: Start, until: int, max_steps: int
) -> str:
    """Return why the steps from `start` to step `until` cannot be taken again; "" if they can."""
    is_branch = bool(first.config.train.branch_from or second.config.train.branch_from)
    if is_branch and not start.checkpoint:
        return (
            "one is a branch of another run, which did not begin with initial weights, and both "
            f"have no checkpoint of one step before step {until}"
        )
    steps = until - start.step
    # nearer checkpoints would help, but there are none that both have
    if steps > max_steps:
        return (
            f"the runs part in step {until}, and the newest state before it that both have is of "
            f"step {start.step}: give --steps {steps} or more to locate it by replay"
        )
    if not _constant_batch(first.config, start, steps):
        return (
            f"train.batch_schedule changes the batch between steps {start.step + 1} and {until}, "
            "and a replay has one batch"
        )
    consumed = _consumed(start)
    end = first.config.batches.after(consumed, steps)
    if not first.config.lengths.are_whole(consumed, end):
        return (
            f"train.seq_schedule cuts samples of the steps {start.step + 1} to {until}, and a "
            "replay has whole ones"
        )
    return ""


def _replay_steps(
    first: Side, second: Side, records: Records, exact: bool, max_steps: int
) -> dict[str, Any]:
    """Take steps of both runs again, and return fields of the document: "verdict"; "why", in words,
    if there is a reason; "replay", with the place, and "keys" if steps were taken."""
    # To the step in which the records part. If they agree two steps are enough: the second begins
    # with weights and moments that a step has made.
    first_step = max(first.first_step, second.first_step)
    until = records.parting.step if records.parting else first_step + min(2, max_steps)
    # the newest state that both have: a checkpoint of one step, or the initial weights
    start = common_start(first, second, until, exact)
    steps = until - start.step
    batch = _constant_batch(first.config, start, steps)
    reason = _reason_against_replay(first, second, start, until, max_steps)
    untaken_verdict = PART if records.parting else UNTRIED
    if reason:
        return {"verdict": untaken_verdict, "why": "; ".join([*start.passed_over, reason])}
    how = "bit by bit" if exact else "in float64"
    _report_progress(f"steps {start.step + 1} to {until} are taken again, {how}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in launched ranks, whose sums have the order of one thread
    try:
        with scratch_folder("bisect") as temporary:
            folder = Path(temporary)
            # in full size, for the difference is of these very runs
            plan = Plan(steps, small=False, start=start.checkpoint, states=True)
            first_corpus = _open_data(first.config, records)
            second_corpus = _open_data(second.config, records)
            replay = Replay(
                _prepare_config(first.config, batch, first_corpus, steps, folder),
                _prepare_config(second.config, batch, second_corpus, steps, folder),
                plan,
                (first.name, second.name),
                folder,
            )
            entry = located_bits(replay) if exact else located_in_float64(replay)
    except RunFailed as failure:
        return {"verdict": untaken_verdict, "why": f"a replay did not finish: {failure}"}
    finally:
        torch.set_num_threads(threads)
    outcome = _replay_verdict(entry | {"from_step": start.step}, records)
    if start.passed_over:
        # Checkpoints of one step that differ are passed over, and are a difference by themselves.
        reasons = list(start.passed_over)
        if "why" in outcome:
            reasons.append(outcome["why"])
        outcome |= {"verdict": PART, "why": "; ".join(reasons)}
    return outcome | {"keys": other_tokens(first_corpus, second_corpus)}


def _open_data(config: RunConfig, records: Records) -> Corpus:
    """Open the data of a run. Raises RunFailed if it is not there, but the records have shown that
    the runs part."""
    try:
        return open_corpus(config)
    except UserError as error:
        # the records alone are an answer then
        if records.parting is None:
            raise
        raise RunFailed("; ".join(error.problems)) from error


def _consumed(start: Start) -> int:
    """Return the samples that were consumed before `start`."""
    if not start.checkpoint:
        return 0
    return read_progress(Store(Path(start.checkpoint))).samples


def _constant_batch(config: RunConfig, start: Start, steps: int) -> int:
    """Return the global batch of the steps that follow on `start`; 0 if they differ in it."""
    stretch = next(config.batches.stretches(_consumed(start)))
    is_constant = stretch.steps is None or steps <= stretch.steps
    return stretch.batch if is_constant else 0


def _prepare_config(
    config: RunConfig, batch: int, corpus: Corpus, steps: int, folder: Path
) -> RunConfig:
    """Return the run as it is taken again: in its own size, on its own data, on the CPU.

    batch: of each step that is taken.
    """
    if config.train.batch_schedule:
        config = config.with_constant_batch(batch)
    # of any size, for they are read only where a run is made small
    limits = LayoutLimits(tensor=1, pipeline=1, data=1)
    prepared = made_ready(config, limits, full=True, steps=steps, folder=folder)
    return with_vocabulary(prepared, corpus)


def _replay_verdict(entry: dict[str, Any], records: Records) -> dict[str, Any]:
    """Return verdict and reason that follow from the entry of a replay."""
    if entry["verdict"] == WRONG:
        return {"verdict": PART, "replay": entry}
    if entry["verdict"] == NOT_TRIED:
        verdict = PART if records.parting else UNTRIED
        return {"verdict": verdict, "why": entry["why"], "replay": entry}
    if records.parting is None:
        return {"verdict": AGREE, "why": "the steps that were taken again agree", "replay": entry}
    reason = (
        "the records differ, but the same steps taken again agree: the difference does not come "
        "back. Other versions, threads or keys, or hardware that computed wrongly "
        "(train.sentinel), made one of the records"
    )
    # A replay in float64 does not show what the runs' own precision has done.
    if entry["precision"] == "fp64":
        reason += "; or it is of the runs' precision: megaprec parity --precision configured"
    return {"verdict": PART, "why": reason, "replay": entry}


def _report_progress(text: str) -> None:
    print(f"bisect     {text}", file=sys.stderr, flush=True)


def show(document: dict[str, Any]) -> None:
    """Print what the bisection has shown."""
    for key in document["keys"]:
        say(f"key        {key}")
    records = document["records"]
    if records["by"]:
        steps = f"{counted(records['steps'], 'step')} of {records['by']}"
        say(f"records    {steps}: {_difference_text(records.get('first'))}")
    else:
        say("records    none that both runs have")
    replay = document["replay"]
    if replay is not None and replay["verdict"] == WRONG:
        for label, text in _location_lines(replay):
            say(f"{label:11}{text}")
    if "why" in document:
        say(f"note       {document['why']}")
    say(document["verdict"])


def _difference_text(first: dict[str, Any] | None) -> str:
    """Return the first difference of the records in words."""
    if not first:
        return "no difference"
    moment = "in the state loaded after step" if first.get(LOADED) else "after step"
    others = ""
    if first["others"]:
        others = f" and {first['others']} more"
    values = " | ".join(first["values"])
    return f"first difference {moment} {first['step']}: {first['what']}{others} ({values})"


def _location_lines(replay: dict[str, Any]) -> list[tuple[str, str]]:
    """Return where the runs part, as pairs of a label and a text."""
    first = replay["first"]
    # steps of a replay are counted from its start
    step = first["step"] + replay["from_step"]
    lines = [
        ("compared", replay["compared"]),
        ("arises in", f"{first['phase']}: {first['place']}"),
        ("first", describe_difference(first | {"step": step})),
    ]
    if "ranks" in first:
        lines.append(("ranks", ", ".join(map(str, first["ranks"]))))
    if "microbatch" in first:
        microbatch = f"micro-batch {first['microbatch']} of replica {first['replica']}"
        lines.append(("first in", f"{microbatch}, sample {first['sample']} of the batch"))
    return [*lines, ("cause?", replay["likely_cause"])]
