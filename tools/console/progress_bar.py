"""Progress on a terminal, as a line that is redrawn; otherwise as plain lines."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
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

from megaprec.text.build import SKIPPED, BuildResult
from megaprec.tokens.files import with_suffix
from megaprec.url_secrets import masked
from tools.console.wrapped import last_parts_that_fit, say, wrapped_parts

PLAIN_SECONDS = 10  # between two plain lines
BAR_WIDTH = 20  # columns of a bar at least
WIDTH_BESIDE = 14  # columns of percentage and time beside the bar of a build


def tell_left_out(text_name: str, left_out: Sequence[str]) -> None:
    """Name on stderr, in one line, the files of a folder that are not read. left_out: their kinds,
    in words."""
    if left_out:
        say(f"{text_name}: left out {', '.join(left_out)}", sys.stderr)


def skipped_words(result: BuildResult) -> str:
    """Return how many bad files and rows a build has left out, and where they are named."""
    listed = with_suffix(result.prefix, SKIPPED)
    return f"bad files and rows left out: {result.skipped:,}, named in {listed}"


@contextmanager
def _show_bar(console: Console, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a bar that is shown until the context ends if `console` is a terminal, and otherwise
    not at all."""
    progress_bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    # Releases of rich before 15 print an empty line also after a bar that is disabled.
    with progress_bar if console.is_terminal else nullcontext():
        yield progress_bar


@contextmanager
def build_progress(
    text_name: str, total_chars: int | None, left_out: Sequence[str]
) -> Iterator[Callable[[int, int, int], None]]:
    """Show, on stderr, the progress of tokenizing a text.

    Yields the callback of `megaprec.text.build`, for documents, characters and tokens so far.

    total_chars: None if that is not known. left_out: see `tell_left_out`.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    if not console.is_terminal:
        _print_plain(console, f"building the data set of {masked(text_name)}")
    tell_left_out(text_name, left_out)
    with _show_bar(console, *columns) as progress_bar:
        task_id = progress_bar.add_task(f"reading {masked(text_name)}", total=total_chars)
        start_time = time.monotonic()
        last_line = start_time  # when a plain line was printed
        first_tokens: int | None = None  # an interrupted build resumes: they were there before

        def on_progress(documents: int, chars: int, tokens: int) -> None:
            nonlocal first_tokens, last_line, start_time
            now = time.monotonic()
            text_parts = [f"{documents:,} documents", f"{tokens:,} tokens"]
            if first_tokens is None:
                first_tokens = tokens
                start_time = now
            else:
                seconds = max(now - start_time, 1e-3)
                speed = (tokens - first_tokens) / seconds
                text_parts.append(f"{speed:,.0f} tokens/s")
            # the newest figures are the last parts
            width = console.width - BAR_WIDTH - WIDTH_BESIDE
            description = last_parts_that_fit(text_parts, width)
            progress_bar.update(task_id, completed=chars, description=description)
            if not console.is_terminal and now - last_line > PLAIN_SECONDS:
                last_line = now
                _print_plain(console, f"{chars / 1e6:,.0f} M characters  {'  '.join(text_parts)}")

        yield on_progress


def _print_plain(console: Console, line: str) -> None:
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
        self._bar = Progress(*columns, console=Console(), expand=True)
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
        _print_plain(self._bar.console, wrapped_parts(line, self._bar.console.width))

    def stop(self) -> None:
        self._bar.stop()


@contextmanager
def bytes_progress(title: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Show, on stderr, how much of `size` bytes is moved; yields a callback for the bytes just
    moved and a word."""
    console = Console(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    columns = (
        description,
        BarColumn(BAR_WIDTH),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
    )
    with _show_bar(console, *columns) as progress_bar:
        task_id = progress_bar.add_task(title, total=size)

        def on_moved(nbytes: int, text: str) -> None:
            progress_bar.update(task_id, advance=nbytes, description=text)

        yield on_moved


@contextmanager
def tokens_progress(text_name: str) -> Iterator[Callable[[int], None]]:
    """Show, on a terminal, how many tokens of a text are evaluated; yields a callback for the
    tokens just done."""
    console = Console(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    with _show_bar(console, description) as progress_bar:
        shown_name = masked(text_name)
        task_id = progress_bar.add_task(f"evaluating {shown_name}", total=None)
        start_time = time.monotonic()
        done = 0

        def on_tokens(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - start_time, 1e-3)
            progress_bar.update(
                task_id,
                description=f"evaluating {shown_name}  {done:,} tokens  {speed:,.0f} tokens/s",
            )

        yield on_tokens
