"""One measurement taken: its process, and the records that it prints, as each is known.

A file of laws is one of tests that need a GPU (`tests/gpu`), which pytest runs.
"""

import sys
import time
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import IO

from tools.bench.child import Child
from tools.bench.gpu_plan import ROOT, Measurement
from tools.bench.gpu_records import Record, is_law, record_of

SILENCE = 120.0  # seconds that a test may take: then it hangs, and the next ones are tried
MOST_STARTS = 4  # of pytest for a file: after tests that hang, or that end their process
NO_TESTS = 5  # pytest's exit code where it has none left


def take(
    measurement: Measurement, left: float, log: IO[bytes], known: Collection[str] = ()
) -> Iterator[Record]:
    """Run a measurement and yield its records; the last one says whether it came to its end.

    left: seconds of the call. log: takes all that is no record. known: tests of a file of laws that
        are not tried again.
    """
    if is_law(measurement.name):
        yield from _take_laws(measurement, left, log, set(known))
        return
    command = command_of(measurement)
    child = Child(command, ROOT, log)
    seconds = min(measurement.seconds, left)
    last: Record | None = None
    for line in child.lines(seconds):
        record = record_of(line)
        if record is None:
            log.write(f"{line}\n".encode())
            continue
        last = record
        yield record
    if last is not None and "refused" in last:
        return
    if child.code == 0 and last is not None:
        yield {"done": True}
    else:
        yield _ending(child, measurement, seconds)


def command_of(measurement: Measurement) -> list[str]:
    """Return the command of a measurement, or of pytest for a file of laws."""
    if not is_law(measurement.name):
        return [sys.executable, "-m", "tools.bench", *measurement.arguments]
    # plugins that a machine has besides may change what tests find, or be of another release
    plugins = ["--disable-plugin-autoload", "-pno:cacheprovider", "-p", "tools.bench.law_reports"]
    options = ["-m", "gpu", "-q", *plugins]
    return [sys.executable, "-m", "pytest", *options, measurement.name]


def _ending(child: Child, measurement: Measurement, seconds: float) -> Record:
    """Return the last record of a process that was ended, or has failed."""
    # the call was over, and not the time of the measurement
    if child.code is None and seconds < measurement.seconds:
        return {"cut": f"the call ended after {seconds:.0f} s of it"}
    return {"refused": child.reason(seconds)}


def _outcomes(
    lines: Iterable[str], log: IO[bytes], known: set[str]
) -> Generator[Record, None, str]:
    """Yield the outcomes of tests, and add the tests to `known`. Return the test that had begun
    when the lines ended; "" if none had."""
    begun = ""
    for line in lines:
        record = record_of(line)
        if record is None:
            log.write(f"{line}\n".encode())
        elif "begun" in record:
            begun = record["begun"]
        else:
            begun = ""
            known.add(record.get("test", ""))
            yield record
    return begun


def _take_laws(
    measurement: Measurement, left: float, log: IO[bytes], known: set[str]
) -> Iterator[Record]:
    """Run the tests of a file that need a GPU and yield the outcome of each when it is known.

    A test that hangs or that ends the process is one that has failed: the others are tried in
    another process. left, known: as in `take`; tests whose outcome is known are added to `known`.
    """
    seconds = min(measurement.seconds, left)
    end = time.monotonic() + seconds
    for _ in range(MOST_STARTS):
        # as arguments of the process: names of tests have any characters
        skipped = [f"--deselect={test}" for test in sorted(known)]
        child = Child([*command_of(measurement), *skipped], ROOT, log)
        lines = child.lines(max(0.0, end - time.monotonic()), SILENCE)
        begun = yield from _outcomes(lines, log, known)
        # pytest came to its end: all passed, some failed, or none was left
        if not begun and child.code in (0, 1, NO_TESTS):
            yield {"done": True}
            return
        is_over = child.code is None and time.monotonic() >= end
        # no test is to blame: none was under way, or the call was over, not the measurement's time
        if not begun or (is_over and seconds < measurement.seconds):
            yield _ending(child, measurement, seconds)
            return
        known.add(begun)
        reason = child.reason(measurement.seconds if is_over else SILENCE)
        yield {"test": begun, "outcome": f"failed: {reason}"}
        if is_over:
            break
    yield {"refused": f"its other tests were not tried: {MOST_STARTS} starts, {seconds:.0f} s"}
