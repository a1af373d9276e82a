"""`python -m tools.bench WHAT ...` prints one line of JSON per measurement."""

import argparse
import sys
from collections.abc import Sequence

from megaprec.errors import UserError
from tools.bench import (
    fp8,
    fused_gathers,
    gpu,
    gpu_page,
    gpu_probe,
    memory,
    optimizer,
    peer,
    recurrent,
    save,
    saved_run,
    scale,
    sums,
    train,
)

MEASUREMENTS = {
    "train": train,
    "save": save,
    "saved-run": saved_run,
    "optimizer": optimizer,
    "fp8": fp8,
    "gpu": gpu,
    "gpu-page": gpu_page,
    "probe": gpu_probe,
    "peer": peer,
    "memory": memory,
    "scale": scale,
    "sums": sums,
    "recurrent": recurrent,
    "fused-gathers": fused_gathers,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of the command line `argv` (default: the process's own); return the exit
    code.
    """
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of all measurements."""
    whole = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = whole.add_subparsers(required=True, metavar="WHAT")
    for name, measurement in MEASUREMENTS.items():
        command = commands.add_parser(
            name,
            help=measurement.SUBJECT,
            description=measurement.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        measurement.add_options(command)
        command.set_defaults(run=measurement.main)
    return whole


if __name__ == "__main__":
    sys.exit(main())
