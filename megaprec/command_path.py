"""The folders in which the command looks for modules: never first the one where it is started.

`python -m megaprec` puts the working directory before everything that is installed, and so does an
empty part of PYTHONPATH. A torch.py or a folder tools there would be taken for another one's. This
module is imported before any other, so it uses only what Python has loaded when it starts.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def is_command() -> bool:
    """Return True while Python starts `python -m megaprec` or the script megaprec, False for other
    programs."""
    if sys.argv[:1] != ["-m"]:
        program = sys.argv[0] if sys.argv else ""
        return os.path.basename(program) == "megaprec"
    # While Python looks for the module, argv[0] is "-m". orig_argv, which has the options of
    # Python itself before the same words, has the module's name in that place.
    words = getattr(sys, "orig_argv", [])
    if len(words) <= len(sys.argv):
        return False
    module = words[-len(sys.argv)].removeprefix("-m")
    return module == "megaprec"


def leave_out_working_folder() -> None:
    """Put megaprec's own folder first. The working directory is left out; if PYTHONPATH names it,
    it comes last.

    Ends the process with exit code 2 if the working directory is gone, where libraries fail in ways
    of their own.
    """
    try:
        os.getcwd()
    except OSError:
        print("the working directory is gone: change to one that is there", file=sys.stderr)
        sys.exit(2)
    here = os.path.realpath(".")
    moved = (os.path.realpath(HOME), here)
    others: list[str] = []
    for entry in sys.path:
        if os.path.realpath(entry or ".") not in moved:  # "" is the working directory
            others.append(entry)
    sys.path[:] = [HOME, *others]
    if not sys.flags.ignore_environment:
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if here in [os.path.realpath(entry) for entry in entries if entry]:
            sys.path.append(here)
