"""Runs `python -m tools.bench gpu` on a machine without network, with the wheels that `pack.py` has
packed. Needs Python and torch alone.

    python3 tools/bench/carried.py --minutes 4
    python3 tools/bench/carried.py --minutes 5 --out results

The records of earlier calls are read from .gpu/gpu.jsonl. Those of this call, the page and the log
are written to --out (default: .gpu). Further arguments are those of `gpu`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / ".gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Install the wheels, and run the call; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--out", type=Path, default=CARRIED, metavar="DIR", help="for records, page and log"
    )
    args, of_gpu = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    records = args.out.resolve() / "gpu.jsonl"
    earlier = CARRIED / "gpu.jsonl"
    if earlier.is_file() and not records.exists():
        shutil.copy(earlier, records)
    site = _install()
    folders = [str(site), str(ROOT)]
    if given_path := os.environ.get("PYTHONPATH"):
        folders.append(given_path)
    path = os.pathsep.join(folders)
    command = [sys.executable, "-m", "tools.bench", "gpu", "--records", str(records)]
    command += ["--page", str(records.with_suffix(".md")), *of_gpu]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


def _install() -> Path:
    """Install the wheels into a folder beside them, once; return it. What cannot be installed is
    said, and the call is tried nevertheless."""
    site = CARRIED / "site"
    wheels = sorted(map(str, (CARRIED / "wheels").glob("*.whl")))
    if site.is_dir() or not wheels:
        return site
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--target", str(site)]
    if subprocess.run([*pip, *wheels]).returncode:
        print("note       the wheels were not installed: one by one", file=sys.stderr)
        for wheel in wheels:
            subprocess.run([*pip, wheel])
    return site


if __name__ == "__main__":
    sys.exit(main())
