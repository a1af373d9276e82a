"""A run folder as the report reads it. Every file of it may be missing, damaged or written by
someone else."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.parsing import parse_json, parse_toml
from megaprec.url_secrets import masked, masked_inside
from tools.config.run_file import RunConfig, is_cut, load_run, run_file_in
from tools.journal.records import (
    BRANCHED,
    EVENTS,
    METRICS,
    lost_steps,
    no_run,
    odd_records,
    read_lines,
    read_metrics,
)

LARGEST_FILE = 50_000_000  # bytes of a file that is read whole, other than those of records


@dataclass(frozen=True)
class ReportedKey:
    """A key of the run file: its value in TOML's grammar, and its origin, without secrets of
    URLs."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Run:
    """A run folder. records: of its steps. events: all, oldest first."""

    folder: Path
    records: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Return the run in `folder`. Raises UserError if it has no record of a step."""
        records = read_metrics(folder)
        if not records:
            raise UserError(no_run(folder))
        lines = read_lines(folder / EVENTS)
        # `notes` tells of damaged lines
        # a version without the mask may have written them
        events = [masked_inside(line.record) for line in lines if line.record is not None]
        return cls(folder, records, events)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def notes(self) -> list[str]:
        """Notes on damaged lines of the records, on steps without one, and on a run file that is
        cut short."""
        notes = odd_records(self.folder)
        if is_cut(self._run_file_text):
            # of a file that is cut short, `config` is the reason why it cannot be read
            notes.append(str(self.config))
        if lost := lost_steps(self.folder / METRICS):
            notes.append(lost)
        return notes

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, oldest first."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def branching(self) -> dict[str, Any] | None:
        """The event with which the run began as a branch of another one; None if it did not."""
        branchings = self.of_kind(BRANCHED)
        return branchings[-1] if branchings else None

    @cached_property
    def run_file(self) -> Path | None:
        """The resolved run file that the run has saved."""
        path = run_file_in(self.folder, written_by_run=True)
        return path if path and _is_readable(path) else None

    @cached_property
    def keys(self) -> list[ReportedKey]:
        """Every key of the run file, with its origin. Of one that is cut short none: which it has
        lost is not known."""
        text = self._run_file_text
        return [] if is_cut(text) else list(_read_keys(text))

    @cached_property
    def _run_file_text(self) -> str:
        """The text of the run file; "" if there is none."""
        if self.run_file is None:
            return ""
        return read_whole(self.run_file).decode(errors="replace")

    @cached_property
    def config(self) -> RunConfig | str:
        """The run file as it was read, or the reason why it cannot be."""
        # a report is of what was run: a file that the user may have changed since does not count
        if self.run_file is None:
            return "there is no run.toml that the run has written"
        try:
            return load_run(self.run_file)
        except (UserError, ValueError) as error:  # the report goes on without it
            return str(error)

    def json(self, file_name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of the folder: None if there is no such file, {} if it
        holds none."""
        path = self.folder / file_name
        if not os.path.lexists(path):
            return None
        try:
            content = parse_json(read_whole(path)) if _is_readable(path) else {}
        except (OSError, ValueError):
            return {}
        return masked_inside(content) if isinstance(content, dict) else {}


def _is_readable(path: Path) -> bool:
    """Return True if a path is a regular file of a size that the report reads."""
    return path.is_file() and path.stat().st_size < LARGEST_FILE


def _read_keys(text: str) -> Iterator[ReportedKey]:
    """Yield the keys of a run file as a run saves it: a line each, with the origin as a comment."""
    table = ""
    for line in text.splitlines():
        # A simple reader will do: the file begins with the mark of files that a run has written.
        if line.startswith("[") and line.endswith("]"):
            table = line[1:-1]
        elif " = " in line and not line.startswith("#"):
            key_name, _, value_and_origin = line.partition(" = ")
            value, _, origin = value_and_origin.rpartition("  # ")
            yield ReportedKey(f"{table}.{key_name}", masked(value), masked(_unescape(origin)))


def _unescape(origin: str) -> str:
    """Return the text of a comment, in which quotes and backslashes are escaped as in TOML."""
    try:
        return str(parse_toml(f'value = "{origin}"')["value"])
    except (ValueError, KeyError, json.JSONDecodeError):
        return origin
