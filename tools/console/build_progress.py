"""Progress of the building of a data set, and what it has left out."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from megaprec.text.build import SKIPPED, BuildResult
from megaprec.tokens.files import with_suffix
from megaprec.url_secrets import masked
from tools.console.progress_bar import (
    BAR_WIDTH,
    WIDTH_BESIDE,
    PlainLines,
    console_of,
    print_plain,
    show_bar,
)
from tools.console.wrapped import last_parts_that_fit, say


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
def build_progress(
    text_name: str, total_chars: int | None, left_out: Sequence[str]
) -> Iterator[Callable[[int, int, int], None]]:
    """Show, on stderr, the progress of tokenizing a text.

    Yields the callback of `megaprec.text.build`, for documents, characters and tokens so far.

    total_chars: None if that is not known. left_out: see `tell_left_out`.
    """
    console = console_of(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    if not console.is_terminal:
        print_plain(console, f"building the data set of {masked(text_name)}")
    tell_left_out(text_name, left_out)
    with show_bar(console, *columns) as progress_bar:
        task_id = progress_bar.add_task(f"reading {masked(text_name)}", total=total_chars)
        start_time = time.monotonic()
        plain_lines = PlainLines(console)
        first_tokens: int | None = None  # an interrupted build resumes: they were there before

        def on_progress(documents: int, chars: int, tokens: int) -> None:
            nonlocal first_tokens, start_time
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
            plain_lines.say(f"{chars / 1e6:,.0f} M characters  {'  '.join(text_parts)}")

        yield on_progress
