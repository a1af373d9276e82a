"""`megaprec report RUN_DIR -o FILE.html`: write a page about a run.

The page is one file that needs no network: pictures, changes on resume, skipped steps and their
causes, speed, memory, schedule, evidence, faults, and the configuration with its origins.
"""

import argparse
from pathlib import Path

from megaprec.errors import UserError
from megaprec.tokens.files import write_whole
from tools.analysis.report.run import Run
from tools.analysis.report.sections import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.description = __doc__
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="folder of a run")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        type=Path,
        required=True,
        help="file to write; it is replaced",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec report`; return the exit code."""
    if args.output.suffix not in (".html", ".htm"):
        raise UserError.of("command.report_suffix", output=args.output)
    if not args.output.absolute().parent.is_dir():
        raise UserError.of("command.plot_folder", path=args.output, parent=args.output.parent)
    # records may hold halves of surrogates, which UTF-8 has no bytes for
    content = page(Run.read(args.folder)).encode("utf-8", errors="replace")
    write_whole(args.output, content)
    print(f"written    {args.output}, {len(content) / 1000:,.0f} kB")
    return 0
