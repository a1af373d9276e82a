"""Follows the published curve in all ways of running; writes the page and the picture."""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.golden.command_run import NAME as COMMAND
from tests.golden.command_run import command_run
from tests.golden.page import deviations, draw, page
from tests.golden.runs import WAYS, Curve, engine_run, plain_run
from tests.golden.stream import PUBLISHED, SETTING, is_published, read_text

PLAIN = "torch alone"
SHOWN = WAYS[0].name
NO_TEXT = "golden: TEXT={path}: give the file {name}, {source}, whose sha256 is {digest}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--text", default="", help="the text of the published run")
    parser.add_argument("--page", type=Path, help="file to write the page to")
    parser.add_argument("--plot", type=Path, help="file beside the page to draw the curves in")
    arguments = parser.parse_args()
    path = Path(arguments.text)
    if not path.is_file() or not is_published(path):
        text = PUBLISHED["text"]
        problem = NO_TEXT.format(
            path=arguments.text, name=text["name"], source=text["from"], digest=text["sha256"]
        )
        print(problem, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    began = time.monotonic()
    curves: dict[str, Curve] = {}
    print(f"{PLAIN} ...", flush=True)
    curves[PLAIN] = plain_run(SETTING, read_text(path))
    for way in WAYS:
        print(f"{way.name} ...", flush=True)
        curves[way.name] = engine_run(way, SETTING, path)
    print(f"{COMMAND} ...", flush=True)
    with TemporaryDirectory(prefix="megaprec_golden_") as folder:
        curves[COMMAND] = command_run(SETTING, read_text(path), Path(folder))
    minutes = (time.monotonic() - began) / 60
    if arguments.plot is not None:
        draw(curves, SHOWN, arguments.plot)
    if arguments.page is not None:
        picture = arguments.plot.name if arguments.plot is not None else ""
        arguments.page.write_text(page(curves, PLAIN, minutes, picture))
    differing = deviations(curves)
    print("\n".join(differing) if differing else "all numbers agree with the published ones")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
