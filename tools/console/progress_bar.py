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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from megaprec.url_secrets import masked
from tools.console.wrapped import last_parts_that_fit, wrapped_parts

PLAIN_SECONDS = 10  # between two plain lines
BAR_WIDTH = 20  # columns of a bar at least
WIDTH_BESIDE = 14  # columns of percentage and time beside the bar of a build


def console_of(*, stderr: bool = False) -> Console:
    """Return the console of stdout or stderr for what is drawn over itself. FORCE_COLOR, which
    notebooks set for all that they start, makes no terminal of a pipe: bars would fill it."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, force_terminal=stream.isatty())


@contextmanager
def show_bar(console: Console, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a bar that is shown until the context ends if `console` is a terminal, and otherwise
    not at all."""
    progress_bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    # Releases of rich before 15 print an empty line also after a bar that is disabled.
    with progress_bar if console.is_terminal else nullcontext():
        yield progress_bar


def print_plain(console: Console, line: str) -> None:
    """Print a line as it is: without colors, and broken by the terminal alone."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class Steps:
    """A bar over the steps of a run on stdout, the last line; other lines are printed above it and
    stay."""

    def __init__(self, done: int, total: int) -> None:
        # takes the width that the text leaves
        flexible_bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            flexible_bar,
            TextColumn("{task.fields[text]}"),
        )
        self._bar = Progress(*columns, console=console_of(), expand=True)
        self._total = total
        self._task = self._bar.add_task("", total=total, completed=done, text="")
        self._bar.start()

    def update(self, step: int, text_parts: list[str]) -> None:
        """Show how far the run is. text_parts: of the text, of which the last ones that leave
        `BAR_WIDTH` columns are shown."""
        width = self._bar.console.width - len(f"step {step}/{self._total}") - BAR_WIDTH - 2
        self._bar.update(self._task, completed=step, text=last_parts_that_fit(text_parts, width))

    def say(self, line: str) -> None:
        """Print a line above the bar, broken between its parts, which are separated by two
        spaces."""
        print_plain(self._bar.console, wrapped_parts(line, self._bar.console.width))

    def stop(self) -> None:
        self._bar.stop()


class PlainLines:
    """Lines about work that takes long, on a console that is no terminal: one in `PLAIN_SECONDS` at
    most. A terminal has a bar instead."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Print the line if it is due."""
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last > PLAIN_SECONDS:
            self._last = now
            print_plain(self._console, line)


@contextmanager
def bytes_progress(title: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Show, on stderr, how much of `size` bytes is moved; yields a callback for the bytes just
    moved and a word."""
    console = console_of(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    columns = (
        description,
        BarColumn(BAR_WIDTH),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
    )
    plain_lines = PlainLines(console)
    moved = 0
    with show_bar(console, *columns) as progress_bar:
        task_id = progress_bar.add_task(title, total=size)

        def on_moved(nbytes: int, text: str) -> None:
            nonlocal moved
            moved += nbytes
            progress_bar.update(task_id, advance=nbytes, description=text)
            plain_lines.say(f"{text}  {moved / max(size, 1):.0%}")

        yield on_moved


@contextmanager
def tokens_progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show, on stderr, how many tokens are done and how fast; yields a callback for the tokens just
    done. title: of the work, such as "evaluating code"."""
    console = console_of(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    shown_title = masked(title)
    plain_lines = PlainLines(console)
    with show_bar(console, description) as progress_bar:
        task_id = progress_bar.add_task(shown_title, total=None)
        start_time = time.monotonic()
        done = 0

        def on_tokens(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - start_time, 1e-3)
            line = f"{shown_title}  {done:,} tokens  {speed:,.0f} tokens/s"
            progress_bar.update(task_id, description=line)
            plain_lines.say(line)

        yield on_tokens
