"""Progress on a terminal, as a line that is redrawn; otherwise as plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from megaprec.data.text import Source, left_out_words
from tools.console.wrapped import fitting, say, wrapped_parts

PLAIN_SECONDS = 10  # between two plain lines
BAR = 20  # columns of a bar at least
BESIDE = 14  # columns of percentage and time beside the bar of a build


def tell_left_out(source: Source) -> None:
    """Name on stderr, in one line, the files of a folder that are not read."""
    if source.left_out:
        say(f"{source.name}: left out {', '.join(left_out_words(source.left_out))}", sys.stderr)


@contextmanager
def _shown(console: Console, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a bar that is shown until the context ends if `console` is a terminal, and otherwise
    not at all."""
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    # Releases of rich before 15 print an empty line also after a bar that is disabled.
    with bar if console.is_terminal else nullcontext():
        yield bar


@contextmanager
def building(source: Source) -> Iterator[Callable[[int, int, int], None]]:
    """Show, on stderr, the progress of tokenizing a text; yields the callback of
    `megaprec.data.build`."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(BAR), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    if not console.is_terminal:
        console.print(
            f"building the data set of {source.name}", markup=False, highlight=False, soft_wrap=True
        )
    tell_left_out(source)
    with _shown(console, *columns) as bar:
        task = bar.add_task(f"reading {source.name}", total=source.total_chars())
        before = said = time.monotonic()
        first: tuple[int, int, int] | None = None  # an interrupted build resumes

        def on_progress(documents: int, chars: int, tokens: int) -> None:
            nonlocal first, said, before
            now = time.monotonic()
            parts = [f"{documents:,} documents", f"{tokens:,} tokens"]
            if first is None:
                first = (documents, chars, tokens)
                before = now
            else:
                parts.append(f"{(tokens - first[2]) / max(now - before, 1e-3):,.0f} tokens/s")
            bar.update(
                task, completed=chars, description=fitting(parts, console.width - BAR - BESIDE)
            )
            if not console.is_terminal and now - said > PLAIN_SECONDS:
                said = now
                line = f"{chars / 1e6:,.0f} M characters  {'  '.join(parts)}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield on_progress


class Steps:
    """A bar over the steps of a run on stdout, the last line; other lines are printed above it and
    stay."""

    def __init__(self, done: int, total: int) -> None:
        # takes the width that the words leave
        room = BarColumn(bar_width=None, table_column=Column(ratio=1))
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            room,
            TextColumn("{task.fields[said]}"),
        )
        self._bar = Progress(*columns, console=Console(), expand=True)
        self._total = total
        self._task = self._bar.add_task("", total=total, completed=done, said="")
        self._bar.start()

    def update(self, step: int, said: list[str]) -> None:
        """Show how far the run is. said: parts, of which the last ones that leave `BAR` columns are
        shown."""
        room = self._bar.console.width - len(f"step {step}/{self._total}") - BAR - 2
        self._bar.update(self._task, completed=step, said=fitting(said, room))

    def say(self, line: str) -> None:
        """Print a line above the bar, broken between its parts, which are separated by two
        spaces."""
        shown = wrapped_parts(line, self._bar.console.width)
        self._bar.console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


@contextmanager
def moving(what: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Show, on stderr, how much of `size` bytes is moved; yields a callback for the bytes just
    moved and a word."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(BAR), DownloadColumn(), TimeRemainingColumn(compact=True))
    with _shown(console, *columns) as bar:
        task = bar.add_task(what, total=size)
        yield lambda moved, said: bar.update(task, advance=moved, description=said)


@contextmanager
def scoring(name: str) -> Iterator[Callable[[int], None]]:
    """Show, on a terminal, how many tokens of a text are evaluated; yields a callback for the
    tokens just done."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    with _shown(console, words) as bar:
        task = bar.add_task(f"evaluating {name}", total=None)
        began = time.monotonic()
        done = 0

        def on_tokens(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - began, 1e-3)
            bar.update(
                task, description=f"evaluating {name}  {done:,} tokens  {speed:,.0f} tokens/s"
            )

        yield on_tokens
