"""`python -m tools.bench WHAT ...` prints one line of JSON per measurement."""

import argparse
import sys

from tools.bench import fp8, memory, optimizer, train


def main() -> int:
    """Runs the measurement that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    train.add_parser(commands)
    optimizer.add_parser(commands)
    fp8.add_parser(commands)
    memory.add_parser(commands)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
