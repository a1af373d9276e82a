"""The call stack of a rank's main thread, read by another thread: where it is, and if it waits for other ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import main_thread
from types import FrameType

OURS = f"{Path(__file__).resolve().parents[2]}/"
WAITING = ("megaprec/comm/gloo.py", "megaprec/comm/axis.py", "parallel/pipeline/p2p.py", "torch/distributed/")
OUTSIDE = ("torch/", "lib/", "<", *WAITING)  # no code of the model or of the run
LINES = 3


def short_path(path: str) -> str:
    """Return a short path: relative to the repository, or from the name of the library on."""
    if path.startswith(OURS) and ".venv" not in path:
        return path[len(OURS) :]
    _, found, library = path.rpartition("site-packages/")
    if found:
        return library
    return f"lib/{Path(path).name}" if path.startswith((sys.base_prefix, "<frozen")) else path


def main_stack() -> tuple[bool, list[str]]:
    """Return True if the main thread is in a transfer between ranks, and its innermost lines outside of libraries."""
    return summary(sys._current_frames().get(main_thread().ident or 0))


def summary(frame: FrameType | None) -> tuple[bool, list[str]]:
    """Return what `main_stack` returns, for a thread with this innermost frame. Local variables are not touched."""
    waits, lines = False, list[str]()
    for inner in _outwards(frame):
        file = short_path(inner.f_code.co_filename)
        waits |= not lines and file.startswith(WAITING)
        if not file.startswith(OUTSIDE):
            lines.append(f"{file}:{inner.f_lineno} {inner.f_code.co_name}")
        if len(lines) == LINES:
            break
    return waits, lines


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
