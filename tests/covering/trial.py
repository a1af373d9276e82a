"""One row: whether a run file takes it, and what the oracle says of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tests.covering.around import EVALUATION, obeyed, write_around
from tests.covering.options import OPTIONS, Row, words_of_row
from tests.parity.campaign import forked
from tools.commands import parity
from tools.config.run_file import RunConfig, load_run
from tools.convert.hf.config import model_type_of
from tools.verify.oracle.limits import TRANSFORMERS, require_possible, without_left_out
from tools.verify.parity.layouts import fitted, requested_layouts
from tools.verify.parity.ranks import RecordedRun

TRAIN = [
    "train.steps=9",
    "train.seq_length=16",
    "train.folder=unused",
    "train.threads=1",
    "train.eval_samples=8",
    "data.vocab_size=97",
    "model.vocab=97",
    "lr.warmup=5",
    "lr.peak=1e-2",
]
BOUND = 1e-9  # of loss, norm, weights and moments
STEPS = 3
QUANTITIES = ("loss", "gradient", "gradient norm", "weights", "moments")
Together = Callable[[Sequence[RecordedRun], Path], list[None]]


@dataclass(frozen=True)
class Outcome:
    """What became of a row. verdict: "equal", "refused" or "wrong". why: of a refusal its code, of
    a wrong one what differs, of an equal one how near it was, if it was measured."""

    verdict: str
    why: str = ""


def config_of(row: Row) -> RunConfig:
    """The run of a row. Raises UserError for one that is refused."""
    return load_run(None, [*words_of_row(row), *TRAIN])


def layout_text(row: Row) -> str:
    """The layout of a row, as the command takes it."""
    words = [word for word in words_of_row(row) if word.startswith("parallel.")]
    keys = dict(word.removeprefix("parallel.").split("=", 1) for word in words)
    # a list has commas, which part keys: it is the run's own
    keys.pop("recompute_modules", None)
    return ",".join(f"{key}={value}" for key, value in keys.items()) or "tp=1"


def refusal(row: Row) -> str:
    """The codes of the rules that refuse a row; empty if none does."""
    try:
        config = config_of(row)
        require_possible(config, TRANSFORMERS, own_precision=False, full=False)
        limits = parity.LayoutLimits(*(getattr(config.parallel, axis) for axis in parity.AXES))
        ready = parity.made_ready(config, limits, False, STEPS, Path("unused"))
        requested = requested_layouts([layout_text(row)], config.parallel)
        parity.fitting_layouts(ready, requested, explicit=True)
        made = fitted(ready, requested[0])
        model_type_of(
            without_left_out(ready, TRANSFORMERS).model
        )  # that transformers has no such model
    except UserError as error:
        return ", ".join(problem.code or str(problem) for problem in error.problems)
    if row["resume"] != "none" and made.ranks == 1:
        return "one process resumes nothing of another layout"
    if made.left_out:
        return f"left out: {', '.join(made.left_out)}"
    return ""


def names_around(row: Row) -> list[str]:
    """What the trainers of a row do besides their steps."""
    names = [] if row["resume"] == "none" else [row["resume"]]
    return names if row["evaluation"] == "none" else [*names, EVALUATION]


def ranks_of(row: Row) -> int:
    """How many ranks a row needs."""
    axes = [row["tensor"], row["pipeline"], row["data"], "1" if row["context"] == "1" else "2"]
    return 2 ** axes.count("2")


def tried(row: Row, folder: Path, together: Together = forked) -> Outcome:
    """Train the row in its layout and by the oracle. Raises what is no refusal."""
    if why := refusal(row):
        return Outcome("refused", why)
    options = parity.Options("row", [layout_text(row)], oracle="transformers")
    launcher = replace(parity.LOCAL_LAUNCHER, together=together)
    try:
        write_around(folder, names_around(row))
        with obeyed():
            certificate = parity.certify(
                config_of(row), options, folder, lambda text: None, launcher
            )
    except UserError as error:
        return Outcome("refused", ", ".join(problem.code or "" for problem in error.problems))
    problems = list(_problems(certificate["layouts"]))
    return Outcome("wrong", "; ".join(problems)) if problems else Outcome("equal")


def _problems(entries: list[dict[str, Any]]) -> list[str]:
    problems: list[str] = []
    for entry in entries:
        if entry["verdict"] != "proven":
            first = entry.get("first", entry.get("why"))
            problems.append(f"{entry['layout']}: {entry['verdict']}: {first}")
            continue
        for quantity in QUANTITIES:
            measured = entry["quantities"][quantity]
            if measured["verdict"] != "proven" or not measured["error"] <= BOUND:
                problems.append(f"{entry['layout']}: {quantity}: {measured}")
    return problems


def command_of(row: Row) -> str:
    """The command that tries the row again."""
    words = " ".join(f"'{word}'" for word in [*words_of_row(row), *TRAIN])
    return f"megaprec parity empty.toml {words} --oracle transformers --layouts {layout_text(row)}"


def values_of_options() -> dict[str, list[str]]:
    """The names of values by option."""
    return {option: list(values) for option, values in OPTIONS.items()}
