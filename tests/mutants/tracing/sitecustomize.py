"""Notes the lines that a process executes, in a file of its own: each once, when it is first
reached, so that nothing is lost whatever ends the process."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = os.environ["MUTANTS_TRACED_ROOT"] + os.sep
FOLDER = Path(os.environ["MUTANTS_TRACED_FOLDER"])
seen = set[tuple[str, int]]()


def note_line(frame: FrameType, event: str, argument: object) -> Any:
    """Note the line of a frame; the tracer of its other lines."""
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place not in seen:
        seen.add(place)
        path = place[0].removeprefix(ROOT)
        with (FOLDER / str(os.getpid())).open("a") as noted:
            noted.write(f"{path}:{place[1]}\n")
    return note_line


def enter(frame: FrameType, event: str, argument: object) -> Any:
    """The tracer of a call, none for calls of code from elsewhere."""
    if frame.f_code.co_filename.startswith(ROOT):
        return note_line(frame, event, argument)
    return None


sys.settrace(enter)
threading.settrace(enter)
