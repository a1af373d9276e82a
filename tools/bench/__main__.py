"""`python -m tools.bench WHAT ...` prints one line of JSON per measurement."""

import argparse
import sys
from collections.abc import Sequence

from megaprec.errors import UserError
from tools.bench import fp8, gpu, hot_path, memory, optimizer, save, scale, sums, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of the command line `argv` (default: the process's own); return the exit
    code."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of all measurements."""
    made = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = made.add_subparsers(required=True, metavar="WHAT")
    for measurement in (train, save, optimizer, fp8, gpu, memory, hot_path, scale, sums):
        measurement.add_parser(commands)
    return made


if __name__ == "__main__":
    sys.exit(main())
