"""`log.profile`: some steps of a run by torch's profiler, on chosen ranks.

Each of these ranks writes two files into RUN/profile: a Chrome trace, which Perfetto opens, and a
table of operators, of modules' forward passes and on a GPU of kernels. What a module takes is seen
by spans around its forward pass; numbers in names become *, so that all layers are one row.

The profiler slows the steps that it sees, and changes none of their numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from megaprec.durable import put_text
from tools.console.wrapped import say
from tools.journal.kernel_table import kernel_record, kernels_among

FOLDER = "profile"
_OF_AUTOGRAD = "autograd::engine::"  # begins the names of spans around its operators
MODULE = "module "  # begins the names of the spans of modules
ROWS = 25  # of each table
SHOWN = 3  # operators that are named in the log
Rows = Sequence[tuple[str, int, float]]  # name, runs, milliseconds


def profile_of_steps(
    steps: Sequence[int],
    begin: int,
    ranks: Sequence[int],
    rank: int,
    stages: Mapping[int, nn.Module],
    device: torch.device,
    folder: Path,
) -> "StepProfile | None":
    """Return the profile of those of `steps`, the first and the last, that are left from step
    `begin` on; None if none is, or `rank` is none of `ranks`.

    A note tells of steps that were taken without a profile. stages, device: of this rank.
    """
    if rank not in ranks:
        return None
    first, last = steps
    if begin <= last:
        # a resumed run profiles the steps that are left
        first_left = max(first, begin)
        return StepProfile((first_left, last), rank, stages, device, folder)
    is_profiled = any((folder / FOLDER).glob(f"steps_*_to_{last}.rank_{rank}.txt"))
    if rank == min(ranks) and not is_profiled:
        say(f"note       log.profile = {list(steps)}: these steps are taken already, unseen")
    return None


class StepProfile:
    """The profile of steps first to last of a run, on this rank.

    stages: by their number in the model, those of this rank.
    """

    def __init__(
        self,
        steps: tuple[int, ...],
        rank: int,
        stages: Mapping[int, nn.Module],
        device: torch.device,
        folder: Path,
    ) -> None:
        self._first, self._last = steps
        self._warm_up = max(1, self._first - 1)
        self._rank = rank
        self._stages = stages
        self._device = device
        self._folder = folder / FOLDER
        self._profiler: torch.profiler.profile | None = None
        self._hooks: list[RemovableHandle] = []

    def before(self, step: int) -> None:
        """Start the profiler before the first step of the profile, or one step earlier: what it
        takes to start is then seen in none of them."""
        if self._profiler is not None or not self._warm_up <= step <= self._first:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        for number, stage in self._stages.items():
            self._hooks += list(_mark_modules(stage, number, len(self._stages)))
        schedule = None
        if step < self._first:
            active = self._last - self._first + 1
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1)
        self._profiler = torch.profiler.profile(activities=activities, schedule=schedule)
        self._profiler.start()

    def after(self, step: int) -> None:
        """End the profile after its last step."""
        if step >= self._last:
            self.end(step)
        elif self._profiler is not None:
            self._profiler.step()

    def end(self, step: int) -> None:
        """End a profile that has begun, after step number `step`: write its files, and a line to
        the log."""
        profiler = self._profiler
        if profiler is None:
            return
        self._profiler = None
        if self._device.type == "cuda":
            torch.accelerator.synchronize()
        profiler.stop()
        for hook in self._hooks:
            hook.remove()
        self._folder.mkdir(exist_ok=True)
        name = f"steps_{self._first}_to_{step}.rank_{self._rank}"
        trace = self._folder / f"{name}.json.gz"
        profiler.export_chrome_trace(str(trace))
        operators = _operators(profiler)
        events = profiler.events() or ()
        kernels = kernel_record(kernels_among(events), ROWS)
        modules = _modules(profiler)
        text = _tables(operators, modules, kernels)
        put_text(self._folder / f"{name}.txt", text)
        steps = f"steps {self._first} to {step}"
        longest = _longest_in_words(operators, kernels)
        say(f"profile    {steps} on rank {self._rank}: {longest}; {trace}, for Perfetto")


def _tables(operators: Rows, modules: Rows, kernels: Mapping[str, Any]) -> str:
    """Return the tables of a profile as text. kernels: as `kernel_record` has them."""
    sections = [
        ("operators, by the time of the host in them alone", operators),
        ("forward passes of modules, with those inside them", modules),
    ]
    if "kernel_table" in kernels:
        idle = kernels["idle_share"]
        title = f"kernels; the GPU had none for {idle:.1%} of the time"
        of_kernels = [(str(name), runs, ms) for name, runs, ms, _ in kernels["kernel_table"]]
        sections.append((title, of_kernels))
    texts = [f"{title}\n\n{_as_table(rows)}" for title, rows in sections]
    text = "\n\n".join(texts)
    return text + "\n"


def _longest_in_words(operators: Rows, kernels: Mapping[str, Any]) -> str:
    """Return the operators that took most of the host's time, each with its share, and how long
    the GPU was idle."""
    total = sum(milliseconds for _, _, milliseconds in operators) or 1.0
    longest: list[str] = []
    for operator, _, milliseconds in operators[:SHOWN]:
        share = milliseconds / total
        longest.append(f"{operator} {share:.0%}")
    words = ", ".join(longest)
    if "idle_share" in kernels:
        words += f"; the GPU idle for {kernels['idle_share']:.1%}"
    return words


def _mark_modules(stage: nn.Module, number: int, count: int) -> Iterator[RemovableHandle]:
    """Put a span around the forward pass of each module of a stage; yield what removes it again."""
    for path, module in stage.named_modules():
        # the stage itself is the module without a path
        own_name = f"stage {number}" if count > 1 else "stage"
        name = path or own_name
        spans: list[Any] = []  # a module may be called within itself
        yield module.register_forward_pre_hook(partial(_begin, f"{MODULE}{name}", spans))
        yield module.register_forward_hook(partial(_end, spans), always_call=True)


def _begin(name: str, spans: list[Any], module: nn.Module, arguments: object) -> None:
    """Open a span: a hook before a forward pass. spans: those of the module that are open."""
    span = record_function(name)
    span.__enter__()
    spans.append(span)


def _end(spans: list[Any], module: nn.Module, arguments: object, output: object) -> None:
    """Close the newest span: a hook after a forward pass, also of one that has raised."""
    if spans:
        newest = spans.pop()
        newest.__exit__(None, None, None)


def _operators(profiler: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """Return name, runs and milliseconds of each operator on the host, without those that it calls;
    the longest first."""
    rows: list[tuple[str, int, float]] = []
    for event in profiler.key_averages():
        is_span = event.is_user_annotation or event.key.startswith(_OF_AUTOGRAD)
        microseconds = event.self_cpu_time_total
        if not is_span and microseconds > 0:
            rows.append((event.key, event.count, microseconds / 1e3))
    return _longest_first(rows)


def _modules(profiler: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """Return name, runs and milliseconds of the forward passes of modules, the longest first.
    Modules whose names differ in numbers alone are one row."""
    runs: dict[str, int] = defaultdict(int)
    milliseconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.key.startswith(MODULE):
            path = event.key.removeprefix(MODULE)
            name = re.sub(r"\b\d+\b", "*", path)
            runs[name] += event.count
            milliseconds[name] += event.cpu_time_total / 1e3
    rows = [(name, runs[name], milliseconds[name]) for name in runs]
    return _longest_first(rows)


def _longest_first(rows: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """Return rows of name, runs and milliseconds by falling milliseconds."""

    def milliseconds_of(row: tuple[str, int, float]) -> float:
        _, _, milliseconds = row
        return milliseconds

    return sorted(rows, key=milliseconds_of, reverse=True)


def _as_table(rows: Rows) -> str:
    """Return the first ROWS rows as lines of text, below a line with the names of the columns."""
    lines = [f"{'ms':>14}  {'runs':>8}  name"]
    for name, runs, milliseconds in rows[:ROWS]:
        lines.append(f"{milliseconds:>14,.3f}  {runs:>8,}  {name}")
    return "\n".join(lines)
