"""The rows of a proof: what is run, what is compared with the straight run, and the verdict of
each.

A row is proven if all bits are equal, wrong if one is not, or not tried for a stated reason. The
last row is the control: a resume that was damaged on purpose. If its difference is not seen, the
other rows prove nothing.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.digests import FILE_DIGESTS, INDEX_DIGEST, file_digest, seal_index
from megaprec.checkpoint.reader import Store
from megaprec.durable import put_bytes
from megaprec.errors import UserError
from tools.config.layouts import layout_problems
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG
from tools.verify.parity.layouts import ComparedLayout, every, fitted
from tools.verify.parity.ranks import RunFailed
from tools.verify.prove.first_difference import Parting, by_step, first_parting
from tools.verify.prove.runs import ProofRuns

STRAIGHT = "straight"
AGAIN = "again"
RESUMED = "resumed"
CONTROL = "broken resume"
LOADED = "loaded elsewhere"
OTHER_LAYOUT = "other layout"
NEEDED = (AGAIN, RESUMED, CONTROL)  # rows without which no run is proven
Row = dict[str, Any]


@dataclass(frozen=True)
class ProofSpan:
    """The steps of a proof: (first, last], with a stop after `stop`."""

    first: int
    stop: int
    last: int

    @staticmethod
    def of(first: int, steps: int) -> "ProofSpan":
        return ProofSpan(first, first + steps // 2, first + steps)

    @property
    def before(self) -> range:
        return range(self.first + 1, self.stop + 1)

    @property
    def after(self) -> range:
        return range(self.stop + 1, self.last + 1)


def is_canonical(config: RunConfig) -> bool:
    """Return True if the run has the same bits in every layout."""
    return getattr(config.train, "numerics", "fast") == "canonical"


def other_layout(config: RunConfig) -> ComparedLayout | None:
    """Return a small layout other than the run's own that it can have, None if there is none."""
    candidates = [*reversed(every(2)), {}]  # {}: one process
    # the layout that differs most: one process for several ranks, and the other way round
    if config.world_size > 1:
        candidates.reverse()
    for keys in candidates:
        layout = fitted(config, keys)
        if layout.parallel != config.parallel and not layout_problems(config, layout.parallel):
            return layout
    return None


def proof(
    proof_runs: ProofRuns, step_span: ProofSpan, layout: ComparedLayout | None
) -> Iterator[Row]:
    """Run everything and yield the rows. layout: another one, None if none fits.

    Raises RunFailed if the straight run fails.
    """
    proof_runs.begin(STRAIGHT)
    proof_runs.take(STRAIGHT, step_span.last)
    yield _try_row(AGAIN, step_span.before, lambda: _repeat(proof_runs, step_span))
    if not proof_runs.digests(AGAIN):
        return
    # the other rows go on from the checkpoint of the repeated run
    proof_runs.copy(AGAIN, RESUMED)
    at_stop = range(step_span.stop, step_span.stop + 1)
    all_steps = range(step_span.first + 1, step_span.last + 1)
    yield _try_row(RESUMED, step_span.after, lambda: _resume(proof_runs, step_span, RESUMED))
    yield _try_row(LOADED, at_stop, lambda: _load_elsewhere(proof_runs, step_span, layout), layout)
    yield _try_row(
        OTHER_LAYOUT, all_steps, lambda: _train_elsewhere(proof_runs, step_span, layout), layout
    )
    # the damage is seen when the state is loaded, and a step later
    stop_and_next = range(step_span.stop, step_span.stop + 2)
    yield _try_row(CONTROL, stop_and_next, lambda: _try_damage(proof_runs, step_span))


def overall(rows: list[Row], needed: Collection[str] = NEEDED) -> str:
    """Return the verdict on the whole run. needed: rows without which it is not proven."""
    verdicts = {row["row"]: row["verdict"] for row in rows}
    # of any row, also of one that is not needed
    if WRONG in verdicts.values():
        return WRONG
    if all(verdicts.get(run_name) == PROVEN for run_name in needed):
        return PROVEN
    return NOT_TRIED


def needed_rows(config: RunConfig, named: bool) -> tuple[str, ...]:
    """Return the rows that a proof needs. named: the user has named a layout, and waits for a
    verdict on it."""
    if not named:
        return NEEDED
    if is_canonical(config):
        return (*NEEDED, LOADED, OTHER_LAYOUT)
    return (*NEEDED, LOADED)


def _try_row(
    run_name: str, steps: range, run: Callable[[], Row], layout: ComparedLayout | None = None
) -> Row:
    """Return a row with its name and steps; a run that failed is one that was not tried."""
    head: Row = {"row": run_name, "steps": [steps.start, steps.stop - 1]}
    if layout is not None:
        head["layout"] = layout.name
    try:
        return head | run()
    except RunFailed as failure:
        return head | _not_tried(str(failure))


def _not_tried(why: str) -> Row:
    return {"verdict": NOT_TRIED, "why": why}


def _verdict(parting: Parting | None) -> Row:
    if parting is None:
        return {"verdict": PROVEN}
    return {"verdict": WRONG, "why": parting.describe(), "first": parting.fields()}


def _repeat(proof_runs: ProofRuns, step_span: ProofSpan) -> Row:
    proof_runs.begin(AGAIN)
    proof_runs.take(AGAIN, step_span.stop)
    return _compare_steps(proof_runs, AGAIN, step_span.before)


def _resume(
    proof_runs: ProofRuns, step_span: ProofSpan, run_name: str, parallel: Parallel | None = None
) -> Row:
    """Resume a copy of the stopped run; return the row of the comparison of the loaded state, then
    of each step."""
    if not _any_applied(proof_runs, step_span.before) or not _any_applied(
        proof_runs, step_span.after
    ):
        return _not_tried(
            "no step was applied before the stop, or none after it: take more --steps, or lower "
            "the scale"
        )
    proof_runs.take(run_name, step_span.last, parallel)
    loaded = _compare_loaded(proof_runs, run_name, step_span.stop)
    if loaded["verdict"] != PROVEN:
        return loaded
    return _compare_steps(proof_runs, run_name, step_span.after)


def _load_elsewhere(
    proof_runs: ProofRuns, step_span: ProofSpan, layout: ComparedLayout | None
) -> Row:
    """Load the checkpoint of the stop in another layout; return the row of the comparison of the
    state. No step is taken."""
    config = proof_runs.config
    if layout is None:
        return _not_tried("no other layout of up to 2 ranks fits this run: name one by --layout")
    # another number of replicas has no place for them
    if config.fp8.keeps_history and not config.fp8.reduce_amax:
        return _not_tried("fp8.reduce_amax = false: each replica has scales of its own")
    proof_runs.copy(AGAIN, LOADED)
    proof_runs.take(LOADED, step_span.stop, layout.parallel)
    return _compare_loaded(proof_runs, LOADED, step_span.stop)


def _train_elsewhere(
    proof_runs: ProofRuns, step_span: ProofSpan, layout: ComparedLayout | None
) -> Row:
    """Train straight in another layout, and resume in it, if the numerics are canonical; return the
    row of the comparison."""
    if not is_canonical(proof_runs.config):
        return _not_tried(
            'train.numerics = "fast": another layout adds in another order, so its last bits '
            "differ; megaprec parity compares layouts with bounds"
        )
    if layout is None:
        return _not_tried("no other layout of up to 2 ranks fits this run: name one by --layout")
    proof_runs.begin(OTHER_LAYOUT)
    proof_runs.take(OTHER_LAYOUT, step_span.last, layout.parallel)
    straight = _compare_steps(proof_runs, OTHER_LAYOUT, (*step_span.before, *step_span.after))
    if straight["verdict"] != PROVEN:
        return straight
    run_name = f"{RESUMED} in {layout.name}"
    proof_runs.copy(AGAIN, run_name)
    return _resume(proof_runs, step_span, run_name, layout.parallel)


def _try_damage(proof_runs: ProofRuns, step_span: ProofSpan) -> Row:
    """Damage a copy of the checkpoint and resume from it; return the row that says whether the
    difference was seen, when loaded and a step later."""
    step_after = range(step_span.stop + 1, step_span.stop + 2)
    # without updates there are no moments to damage, or the damage changes no weight
    if not _any_applied(proof_runs, step_span.before) or not _any_applied(proof_runs, step_after):
        return _not_tried(
            "the step after the stop, or all steps before it, were not applied: take other --steps"
        )
    damaged = turn_one_sign(proof_runs.copy(AGAIN, CONTROL))
    proof_runs.take(CONTROL, step_span.stop + 1)
    loaded = _compare_loaded(proof_runs, CONTROL, step_span.stop)
    later = _compare_steps(proof_runs, CONTROL, (step_span.stop + 1,))
    differences_seen = [row["why"] for row in (loaded, later) if row["verdict"] == WRONG]
    # seen when loaded, and again in the weights of the step after
    if len(differences_seen) < 2:
        why = (
            f"one sign of {damaged} was turned in the checkpoint, and {len(differences_seen)} of 2 "
            "comparisons saw it"
        )
        return {
            "verdict": WRONG,
            "why": f"{why}: this proof is worth nothing",
            "damaged": damaged,
            "seen": differences_seen,
        }
    return {"verdict": PROVEN, "damaged": damaged, "seen": differences_seen}


def _compare_steps(proof_runs: ProofRuns, run_name: str, steps: Collection[int]) -> Row:
    """Return the row of the comparison of a run's states after these steps with those of the
    straight run."""
    own_digests = by_step(proof_runs.digests(run_name))
    straight_digests = by_step(proof_runs.digests(STRAIGHT))
    missing = [step for step in steps if step not in own_digests or step not in straight_digests]
    if missing:
        return _not_tried(f"there is no digest of step {missing[0]}: the run ended before it")
    compared = {step: own_digests[step] for step in steps}
    return _verdict(first_parting(compared, straight_digests))


def _compare_loaded(proof_runs: ProofRuns, run_name: str, stop: int) -> Row:
    """Return the row of the comparison of the state that a run has loaded with that of the straight
    run after step `stop`."""
    own_digests = by_step(proof_runs.digests(run_name), loaded=True)
    straight_digests = by_step(proof_runs.digests(STRAIGHT))
    if stop not in own_digests or stop not in straight_digests:
        return _not_tried(f"there is no digest of the state loaded after step {stop}")
    compared = {stop: own_digests[stop]}
    return _verdict(first_parting(compared, straight_digests, state_only=True))


def _any_applied(proof_runs: ProofRuns, steps: range) -> bool:
    """Return True if the straight run applied one of these steps."""
    return bool(set(steps) & set(proof_runs.applied(STRAIGHT)))


def turn_one_sign(checkpoint: Path) -> str:
    """Turn the sign of the largest element of a moment; return "kind/logical name". Raises
    UserError if all are zero.

    The files must not be shared with another checkpoint.
    """
    checkpoint_store = Store(checkpoint)
    tensors = checkpoint_store.index["tensors"]
    # codes of FP8 are bytes of another format
    stored_names = [stored_name for stored_name in tensors if not stored_name.startswith("fp8/")]
    # a moment, if there is any: a rule without moments leaves the weights
    stored_names.sort(key=lambda stored_name: (stored_name.startswith("weight/"), stored_name))
    for stored_name in stored_names:
        first_chunk = tensors[stored_name]["chunks"][0]
        file_name = first_chunk["file"]
        key_in_file = stored_name.removeprefix("weight/")
        with safe_open(checkpoint_store.file(file_name), "pt") as opened_file:
            stored_values = opened_file.get_tensor(key_in_file).flatten()
        element_index = int(stored_values.abs().argmax())
        if stored_values[element_index] != 0:
            _turn_sign(checkpoint_store.file(file_name), key_in_file, element_index, stored_values)
            _update_digest(checkpoint_store, file_name)
            return stored_name
    raise UserError.of("prove.nothing_to_damage", checkpoint=checkpoint)


def _turn_sign(file: Path, key_in_file: str, element_index: int, stored_values: Tensor) -> None:
    """Turn the sign of element `element_index` of a stored tensor, whose `stored_values` are given,
    in the file."""
    turned = -stored_values[element_index : element_index + 1]
    turned_bytes = turned.view(torch.uint8).numpy().tobytes()
    with file.open("r+b") as opened_file:
        # a safetensors file: the length of the header in 8 bytes, the header, the tensors
        header_length = int.from_bytes(opened_file.read(8), "little")
        header = json.loads(opened_file.read(header_length))
        offset, _ = header[key_in_file]["data_offsets"]
        tensor_start = 8 + header_length + offset
        opened_file.seek(tensor_start + element_index * stored_values.itemsize)
        opened_file.write(turned_bytes)


def _update_digest(checkpoint_store: Store, file_name: str) -> None:
    """Write the digest of a changed file into checkpoint.json, or the damage would be refused
    instead of loaded."""
    changed_index = dict(checkpoint_store.index)
    changed_index.pop(INDEX_DIGEST, None)  # `seal_index` writes a new one
    digest = file_digest(checkpoint_store.file(file_name))
    changed_index[FILE_DIGESTS] = {**checkpoint_store.digests, file_name: digest}
    put_bytes(checkpoint_store.path / INDEX, seal_index(changed_index))
