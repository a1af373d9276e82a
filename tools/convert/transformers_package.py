"""The package transformers, at work without its own warnings and progress bars.

A line of ours says what came of it. If it failed, that line ends with the version of transformers,
unless it is one that megaprec is tested with.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megaprec.tested_versions import untested


def if_untested() -> str:
    """Return the end of a line on what failed: the version of transformers, empty if it is a tested
    one."""
    return "".join(f"; {description}" for description in untested("transformers"))


def why_missing(problem: ImportError) -> str:
    """Return what to say of the package after "transformers": it is not installed, or why it cannot
    be imported."""
    if isinstance(problem, ModuleNotFoundError) and problem.name == "transformers":
        return "is not installed: pip install transformers"
    return f"cannot be imported ({' '.join(str(problem).split())[:300]}){if_untested()}"


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Context manager that gives the package, which is silent within it. Raises ImportError if it
    cannot be imported."""
    # It warns of what a line of ours tells, in words that only its authors know.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
        logging = importlib.import_module("transformers.utils.logging")
        # The caller's own settings are put back.
        verbosity = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield transformers
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
