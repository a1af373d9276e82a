"""Files of tokenizers that a library reads without a panic, a crash, or gigabytes and minutes.

A file that this machine has not met is tried in a separate process (`tokenizer_trial.py`), which
takes some tenths of a second; that it passed is remembered by its digest.
"""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megaprec.errors import UserError
from megaprec.text import tokenizer_trial
from megaprec.text.encoding import is_json
from megaprec.tokens.files import cache_folder, write_whole

PROGRAM = Path(tokenizer_trial.__file__)
# seconds: on a machine that is busy, the limit of processor time takes longer to be reached
PATIENCE = 900


def require_tried(path: Path, content: bytes) -> None:
    """Raise UserError unless a library reads the tokenizer in file `path`, and splits a text,
    within the limits.

    content: of the file. An error that the library raises is no reason: the caller meets it, too.
    """
    record = _record_path(content)
    # it was read on this machine before
    if record is not None and record.is_file():
        return
    library = _library_of(content)
    command = [sys.executable, "-P", str(PROGRAM), str(path.absolute())]
    environment = {**os.environ, "RUST_BACKTRACE": "0"}
    try:
        trial = subprocess.run(
            command,
            capture_output=True,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(path, f"the package {library} did not read it in {PATIENCE} s") from error
    if trial.returncode == 0:
        remember(content)
        return
    descriptions = {
        tokenizer_trial.PANIC: "panics",
        -signal.SIGXCPU: f"needs more than {tokenizer_trial.SECONDS} s of processor time",
        -signal.SIGABRT: "aborts, perhaps for want of memory",
    }
    behaviour = descriptions.get(trial.returncode, f"ended with code {trial.returncode}")
    raise _refusal(
        path,
        f"the package {library} {behaviour} when it reads the file and splits a short text with it",
    )


def remember(content: bytes) -> None:
    """Remember on this machine that a tokenizer can be read.

    It was tried, or the library has just written it.
    """
    record = _record_path(content)
    if record is not None:
        with suppress(OSError):  # without a record it is tried again
            write_whole(record, b"")


def _refusal(path: Path, why: str) -> UserError:
    return UserError.of("data.tokenizer_harmful", path=path, why=why)


def _library_of(content: bytes) -> str:
    return "tokenizers" if is_json(content) else "sentencepiece"


def _record_path(content: bytes) -> Path | None:
    """Return the path of this machine's record of a tokenizer, read by the installed version of its
    library.

    None if there is no home folder for a cache.
    """
    cache = cache_folder()
    library = _library_of(content)
    try:
        installed = version(library)
    except PackageNotFoundError:
        return None
    if cache is None:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return cache / "tokenizers" / f"{digest[:32]}-{library}-{installed}"
