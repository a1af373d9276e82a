"""The filesystem that all hosts share: is a file of one host seen by the others, whole, soon, and
once locked, locked?

Rank 0 writes a file, replaces it, and locks it. After each of these the first rank of every host
says what it sees.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaprec.durable import sync, write_file
from tools.console.units import duration
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext

# seconds in which a change must be seen; attribute caches of NFS last 3 to 60
VISIBLE_SECONDS = 8.0
LATE_SECONDS = 3.0  # after which a change is late
POLL_SECONDS = 0.02  # between two looks at the file
SHARE_REMEDY = "mount the same filesystem on all hosts at this path, or give another folder"
CACHE_REMEDY = "mount it with shorter caches (NFS: actimeo=1)"


def probe(context: RankContext) -> Answer:
    """Take part as the first rank of a host; other ranks return nothing."""
    first_ranks = context.first_ranks()
    if context.rank == 0:
        return _write(context, first_ranks[1:])
    if context.rank in first_ranks:
        return _read(context)
    return {}


def _write(context: RankContext, readers: Sequence[int]) -> Answer:
    """Write, replace and lock the file; after each wait until all readers have looked. Returns the
    host that wrote, and where."""
    name = f".megaprec_doctor_shared_{os.getpid()}_{time.time_ns()}"
    shared_folder = context.folder.absolute() / name
    shared_folder.mkdir(parents=True)
    try:
        _publish(shared_folder, b"one")
        context.publish("shared/one", str(shared_folder))
        _await_readers(context, "one", readers)

        _publish(shared_folder, b"two")
        context.publish("shared/two", "")
        _await_readers(context, "two", readers)

        with (shared_folder / "file").open("rb+") as shared_file:
            fcntl.flock(shared_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            context.publish("shared/locked", "")
            # The lock is held until the file is closed, and so until all have tried it.
            _await_readers(context, "locked", readers)
    finally:
        shutil.rmtree(shared_folder, ignore_errors=True)
    return {"host": context.host, "folder": str(context.folder), "writer": True}


def _publish(shared_folder: Path, content: bytes) -> None:
    """Replace the file by one of this content, as checkpoints are published: by a rename."""
    write_file(shared_folder / "new", content)
    os.replace(shared_folder / "new", shared_folder / "file")
    sync(shared_folder)


def _await_readers(context: RankContext, step: str, readers: Sequence[int]) -> None:
    for rank in readers:
        context.wait_for(f"shared/{step}/{rank}", VISIBLE_SECONDS + 2)


def _read(context: RankContext) -> Answer:
    """Look for what rank 0 writes, after each of its steps.

    Return the seconds until each change is seen, None if it is not.
    """
    shared_file = Path(context.wait_for("shared/one", 10.0)) / "file"
    written_s = _seconds_until(shared_file, b"one")
    context.publish(f"shared/one/{context.rank}", 1)

    context.wait_for("shared/two", VISIBLE_SECONDS + 4)
    # A file that was not seen cannot be seen replaced: looking for it would take its full time.
    replaced_s = None if written_s is None else _seconds_until(shared_file, b"two")
    context.publish(f"shared/two/{context.rank}", 1)

    context.wait_for("shared/locked", VISIBLE_SECONDS + 4)
    locked = _is_locked(shared_file)
    context.publish(f"shared/locked/{context.rank}", 1)
    return {
        "host": context.host,
        "folder": str(context.folder),
        "written_s": written_s,
        "replaced_s": replaced_s,
        "locked": locked,
    }


def _seconds_until(shared_file: Path, content: bytes) -> float | None:
    """Return the seconds until the file has this content, None if it has not in time."""
    start = time.monotonic()
    while (waited := time.monotonic() - start) < VISIBLE_SECONDS:
        try:
            if shared_file.read_bytes() == content:
                return waited
        except OSError:
            pass  # not there yet, or being replaced (ESTALE of NFS)
        time.sleep(POLL_SECONDS)
    return None


def _is_locked(shared_file: Path) -> bool | None:
    """Return True if another process holds the file's lock, None if the file is not there."""
    try:
        with shared_file.open("rb+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about each host's view."""
    writer_answer = answers[0]
    readers = [answer for answer in answers[1:] if answer]
    if not readers:
        yield not_tried("shared disk", "one host only: there is nothing to share")
        return
    problems = list[Finding]()
    for reader_answer in readers:
        problems.extend(_judge_reader(reader_answer, writer_answer))
    yield from problems or [_summarize(readers, writer_answer)]


def _judge_reader(reader_answer: Answer, writer_answer: Answer) -> Iterator[Finding]:
    """Yield what is wrong with a shared folder by what one host sees that another has written."""
    shared_folder = f"{reader_answer['folder']} on {reader_answer['host']}"
    if reader_answer["written_s"] is None:
        message = f"{shared_folder}: a file that {writer_answer['host']} wrote there is not seen"
        yield wrong("shared disk", message, SHARE_REMEDY)
        return

    if reader_answer["replaced_s"] is None:
        message = (
            f"{shared_folder}: the old content is seen after {VISIBLE_SECONDS:g} s, although "
            f"{writer_answer['host']} has replaced the file"
        )
        yield wrong("shared disk", message, CACHE_REMEDY)
    elif reader_answer["replaced_s"] > LATE_SECONDS:
        message = (
            f"{shared_folder}: a replaced file is seen after {reader_answer['replaced_s']:.1f} s"
        )
        yield wrong("shared disk", message, CACHE_REMEDY)

    if reader_answer["locked"] is False:  # None: the file is not there, and was judged above
        message = (
            f"{shared_folder}: a file that {writer_answer['host']} has locked can be locked again"
        )
        remedy = "mount it with locks across hosts (NFS: no nolock, Lustre: flock)"
        yield wrong("shared disk", message, remedy)


def _summarize(readers: Sequence[Answer], writer_answer: Answer) -> Finding:
    """Return the finding of a shared filesystem without problems, with the latest change."""
    latest_written = max(reader_answer["written_s"] for reader_answer in readers)
    latest_replaced = max(reader_answer["replaced_s"] for reader_answer in readers)
    latest = max(latest_written, latest_replaced)
    message = (
        f"{writer_answer['folder']}: {len(readers) + 1} hosts see each other's files and locks, "
        f"at the latest after {duration(latest)}"
    )
    return ok("shared disk", message, latest_s=latest)
