"""Progress on a terminal, as a line that is redrawn; otherwise as plain lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from megaprec.data.text import Source, left_out_words

PLAIN_SECONDS = 10  # between two plain lines


@contextmanager
def building(source: Source) -> Iterator[Callable[[int, int, int], None]]:
    """Show, on stderr, the progress of tokenizing a text; yields the callback of `megaprec.data.build`."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    if not console.is_terminal:
        console.print(f"building the data set of {source.name}", markup=False, highlight=False, soft_wrap=True)
    if source.left_out:
        left_out = f"{source.name}: left out {', '.join(left_out_words(source.left_out))}"
        console.print(left_out, markup=False, highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading {source.name}", total=source.total_chars())
        before = said = time.monotonic()
        first: tuple[int, int, int] | None = None  # an interrupted build resumes

        def on_progress(documents: int, chars: int, tokens: int) -> None:
            nonlocal first, said, before
            now = time.monotonic()
            words = f"{documents:,} documents  {tokens:,} tokens"
            if first is None:
                first, before = (documents, chars, tokens), now
            else:
                words += f"  {(tokens - first[2]) / max(now - before, 1e-3):,.0f} tokens/s"
            bar.update(task, completed=chars, description=words)
            if not console.is_terminal and now - said > PLAIN_SECONDS:
                said = now
                console.print(
                    f"{chars / 1e6:,.0f} M characters  {words}", markup=False, highlight=False, soft_wrap=True
                )

        yield on_progress


class Steps:
    """A bar over the steps of a run on stdout; other output is printed above it and stays."""

    def __init__(self, done: int, total: int) -> None:
        room = BarColumn(bar_width=None, table_column=Column(ratio=1))  # takes the width that the words leave
        columns = (TextColumn("step {task.completed}/{task.total}"), room, TextColumn("{task.fields[said]}"))
        self._bar = Progress(*columns, console=Console(), expand=True)
        self._task = self._bar.add_task("", total=total, completed=done, said="")
        self._bar.start()

    def update(self, step: int, said: str) -> None:
        self._bar.update(self._task, completed=step, said=said)

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


@contextmanager
def moving(what: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Show, on stderr, how much of `size` bytes is moved; yields a callback for the bytes just moved and a word."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=size)
        yield lambda moved, said: bar.update(task, advance=moved, description=said)
