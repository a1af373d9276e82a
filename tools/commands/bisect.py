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
import tempfile
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from parallel.described_world import joined_world
from tools.bisect.replay import (
    NotTaken,
    Replay,
    located_bits,
    located_in_float64,
    require_comparable,
)
from tools.bisect.sides import (
    Records,
    Side,
    common_start,
    compare_records,
    must_be_equal,
    other_keys,
    other_tokens,
)
from tools.config.run_file import RunConfig
from tools.console.tables import add_json, put
from tools.console.units import counted
from tools.console.wrapped import say
from tools.parity.certificate import NOT_TRIED, WRONG
from tools.parity.page import told
from tools.parity.ranks import with_vocabulary
from tools.parity.record import Plan
from tools.parity.runs import made_ready
from tools.parity.shrink import Most
from tools.prove.parting import LOADED
from tools.training.corpus import Corpus, open_corpus

AGREE = "they agree"
PART = "they part"
UNTRIED = "not tried"
CODES = {AGREE: 0, PART: 1, UNTRIED: 2}
FORMAT = "megaprec bisect 1"


def add_parser(subparsers: Any) -> None:
    """Add `bisect` to the commands."""
    parser = subparsers.add_parser(
        "bisect", help="find where two runs that ought to agree part", description=__doc__
    )
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
    """Run `megaprec bisect`."""
    if joined_world():
        raise UserError(
            "megaprec bisect starts its own ranks: run it without torchrun or Slurm's srun"
        )
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: give at least 1")
    if Path(args.a).exists() and Path(args.b).exists() and Path(args.a).samefile(args.b):
        raise UserError(
            f"{args.a} and {args.b} are the same run: give two; megaprec prove compares a run "
            "with itself taken again"
        )
    a = Side.opened(args.a)
    b = Side.opened(args.b)
    require_comparable(a.config, b.config)
    for note in (*a.odd_records(), *b.odd_records()):
        _tell(f"note: {note}")
    made = found(a, b, args.steps, args.replay)
    put(args, lambda: made, lambda: show(made))
    return CODES[made["verdict"]]


def found(a: Side, b: Side, most: int, again: bool) -> dict[str, Any]:
    """Return the document: what the records say, what the replay says, and the verdict."""
    exact = must_be_equal(a.config, b.config)
    records = compare_records(a, b, exact)
    made: dict[str, Any] = {
        "format": FORMAT,
        "a": a.name,
        "b": b.name,
        "compared": "bits" if exact else "float64",
        "keys": other_keys(a.config, b.config),
        "records": {"by": records.by, "steps": records.steps} | _fields(records),
        "replay": None,
    }
    if records.by and records.parting is None and not again:
        return made | {"verdict": AGREE, "why": _agreement(records, exact)}
    if records.parting and records.parting.loaded:
        return made | {"verdict": PART, "why": _loaded(a, b, records.parting.step)}
    said = _replayed(a, b, records, exact, most)
    made |= said | {"keys": [*made["keys"], *said.get("keys", [])]}
    if made["keys"] and made["replay"] and "likely_cause" in made["replay"]:
        names = ", ".join(key.partition(":")[0] for key in made["keys"])
        made["replay"]["likely_cause"] = (
            f"the run files differ in {names}; else: {made['replay']['likely_cause']}"
        )
    return made


def _loaded(a: Side, b: Side, step: int) -> str:
    """Return what follows from a loaded state that is not that of the step."""
    why = f"until step {step} the runs agree, and then one went on from another state than they had"
    apart = common_start(a, b, step + 1, exact=True).passed_over
    if apart and f"of step {step} " in apart[0]:
        return f"{why}: {apart[0]}: one was changed after it was saved, or not saved as it was"
    return (
        f"{why}: its checkpoint was changed or lacked something, or was not loaded as it was saved"
    )


def _fields(records: Records) -> dict[str, Any]:
    return {"first": records.parting.fields()} if records.parting else {}


def _agreement(records: Records, exact: bool) -> str:
    how = "losses and norms are close; --replay compares in float64"
    if exact:
        weaker = (
            "losses, norms and scales are the same bits; log.digests or --replay compare the "
            "whole state"
        )
        how = "every bit is equal" if records.by == "digests" else weaker
    if records.beyond:
        how += (
            f"; {counted(records.beyond, 'later step')} without a digest: losses, norms and "
            "scales are the same bits"
        )
    return (
        f"{counted(records.steps, 'step')} of {records.by} "
        f"{'agrees' if records.steps == 1 else 'agree'}: {how}"
    )


def _replayed(a: Side, b: Side, records: Records, exact: bool, most: int) -> dict[str, Any]:
    """Take steps again and return the verdict with the place."""
    until = records.parting.step if records.parting else min(2, most)
    start = common_start(a, b, until, exact)
    if until - start.step > most:
        why = (
            f"the runs part in step {until}, and the newest state before it that both have is of "
            f"step {start.step}"
        )
        more = f"{why}: give --steps {until - start.step} or more to locate it by replay"
        return {
            "verdict": PART if records.parting else UNTRIED,
            "why": "; ".join([*start.passed_over, more]),
        }
    _tell(
        f"steps {start.step + 1} to {until} are taken again, "
        f"{'bit by bit' if exact else 'in float64'}"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks
    try:
        with tempfile.TemporaryDirectory(prefix="megaprec_bisect_") as folder:
            plan = Plan(until - start.step, small=False, start=start.checkpoint, states=True)
            corpora = [_opened(side.config, records) for side in (a, b)]
            configs = [
                _ready(s.config, c, plan.steps, Path(folder))
                for s, c in zip((a, b), corpora, strict=True)
            ]
            replay = Replay(configs[0], configs[1], plan, (a.name, b.name), Path(folder))
            entry = (located_bits if exact else located_in_float64)(replay)
    except NotTaken as failure:
        return {
            "verdict": PART if records.parting else UNTRIED,
            "why": f"a replay did not finish: {failure}",
        }
    finally:
        torch.set_num_threads(threads)
    made = _verdict(entry | {"from_step": start.step}, records)
    if start.passed_over:
        made |= {
            "verdict": PART,
            "why": "; ".join([*start.passed_over, *([made["why"]] if "why" in made else [])]),
        }
    return made | {"keys": other_tokens(*corpora)}


def _opened(config: RunConfig, records: Records) -> Corpus:
    """Open the data of a run. Raises NotTaken if it is not there, but the records have shown that
    the runs part."""
    try:
        return open_corpus(config)
    except UserError as error:
        if records.parting is None:
            raise
        raise NotTaken("; ".join(error.problems)) from error


def _ready(config: RunConfig, corpus: Corpus, steps: int, folder: Path) -> RunConfig:
    """Return the run as it is taken again: in its own size, on its own data, on the CPU."""
    return with_vocabulary(made_ready(config, Most(1, 1, 1), True, steps, folder), corpus)


def _verdict(entry: dict[str, Any], records: Records) -> dict[str, Any]:
    if entry["verdict"] == WRONG:
        return {"verdict": PART, "replay": entry}
    if entry["verdict"] == NOT_TRIED:
        return {
            "verdict": PART if records.parting else UNTRIED,
            "why": entry["why"],
            "replay": entry,
        }
    if records.parting is None:
        return {"verdict": AGREE, "why": "the steps that were taken again agree", "replay": entry}
    why = (
        "the records differ, but the same steps taken again agree: the difference does not come "
        "back. Other versions, threads or keys, or hardware that computed wrongly "
        "(train.sentinel), made one of the records"
    )
    if entry["precision"] == "fp64":
        why += "; or it is of the runs' precision: megaprec parity --precision configured"
    return {"verdict": PART, "why": why, "replay": entry}


def _tell(text: str) -> None:
    print(f"bisect     {text}", file=sys.stderr, flush=True)


def show(made: dict[str, Any]) -> None:
    """Print what was found."""
    for key in made["keys"]:
        say(f"key        {key}")
    records = made["records"]
    if records["by"]:
        first = records.get("first")
        when = f"{'in the state loaded' if first and first.get(LOADED) else ''} after step"
        if first:
            place = f"first difference {when.strip()} {first['step']}: {first['what']}"
        else:
            place = "no difference"
        others = f" and {first['others']} more" if first and first["others"] else ""
        more = f"{others} ({' | '.join(first['values'])})" if first else ""
        say(f"records    {counted(records['steps'], 'step')} of {records['by']}: {place}{more}")
    else:
        say("records    none that both runs have")
    replay = made["replay"]
    if replay is not None and replay["verdict"] == WRONG:
        for word, text in _place(replay):
            say(f"{word:11}{text}")
    if "why" in made:
        say(f"note       {made['why']}")
    say(made["verdict"])


def _place(replay: dict[str, Any]) -> list[tuple[str, str]]:
    first = replay["first"]
    lines = [("compared", replay["compared"])]
    lines += [("arises in", f"{first['phase']}: {first['place']}")]
    lines += [("first", told(first | {"step": first["step"] + replay["from_step"]}))]
    if "ranks" in first:
        lines.append(("ranks", ", ".join(map(str, first["ranks"]))))
    if "microbatch" in first:
        where = f"micro-batch {first['microbatch']} of replica {first['replica']}"
        lines.append(("first in", f"{where}, sample {first['sample']} of the batch"))
    return [*lines, ("cause?", replay["likely_cause"])]
