"""Packs what a machine with a GPU lacks besides torch, for one that has no network: wheels in one
folder, and the commands to run there (`make gpu-pack`).

    python tools/bench/pack.py --python 3.12

`carried.py` installs them there. pip's own settings say where packages come from, constraints.txt
which versions. The folder is .gpu, which git ignores; the records of a call lie there too.
"""

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ".gpu"
# what an image with torch for CUDA does not have, or in a version that may be too old
NEEDED = ("pydantic", "annotated-types", "typing-inspection", "typing-extensions", "shtab")
NEEDED += ("pytest", "pluggy", "iniconfig")
# what measurements are compared with; without them they say so
PEERS = ("megatron-core", "fla-core")
GLIBC = (5, 12, 17, 24, 27, 28, 31, 34, 35)  # minor versions that wheels are built for
MINUTES = (4, 5, 5)  # of the calls


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, and print the commands. Exit code 1: something that is needed could not be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    parser.add_argument(
        "--packages", nargs="+", default=[], metavar="NAME", help="that are needed besides"
    )
    args = parser.parse_args(argv)
    folder = ROOT / FOLDER
    wheels = folder / "wheels"
    # those for another Python would be in the way
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    failed = False
    for name in (*NEEDED, *args.packages):
        failed |= not _download(name, args.python, wheels)
    # its compiled part has one version for each of its own
    failed |= not _download(core_of(wheels), args.python, wheels)
    for name in PEERS:
        _download(name, args.python, wheels)
    (folder / "commit").write_text(_commit(), encoding="utf-8")
    size = sum(path.stat().st_size for path in wheels.iterdir())
    print(f"packed     {len(list(wheels.iterdir()))} wheels, {size / 2**20:.1f} MiB, in {FOLDER}/")
    print(*instructions(), sep="\n")
    return int(failed)


def instructions() -> Iterator[str]:
    """Yield what to do with the folder, and the command of each call."""
    yield f"carry      the clone with {FOLDER}/ to the machine, and run there, in turn:"
    for minutes in MINUTES:
        yield f"           python3 tools/bench/carried.py --minutes {minutes}"
    yield f"           each goes on from {FOLDER}/gpu.jsonl; where another folder comes back,"
    yield f"           name it: --out DIR, and put its gpu.jsonl into {FOLDER}/ before each call"
    yield f"then       python -m tools.bench gpu-page --records {FOLDER}/gpu.jsonl"


def _download(requirement: str, python: str, wheels: Path) -> bool:
    """Download the wheel of a package; return False, and say so, if there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for minor in GLIBC:
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--dest", str(wheels)]
    done = subprocess.run(
        [*command, pinned(requirement)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        _, _, last_line = done.stderr.strip().rpartition("\n")
        reason = last_line or "pip says nothing"
        print(f"note       {requirement} was not packed: {reason}")
    return not done.returncode


def pinned(name: str) -> str:
    """Return the requirement of a package in the version of constraints.txt, if it has one."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions = re.search(rf"^{re.escape(name)}==\S+", constraints, re.MULTILINE)
    return versions[0] if versions else name


def core_of(wheels: Path) -> str:
    """Return the requirement of pydantic's compiled part, as pydantic's wheel names it."""
    for wheel in sorted(wheels.glob("pydantic-*.whl"), reverse=True):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
            text = archive.read(metadata).decode()
        required = re.search(r"^Requires-Dist: (pydantic[-_]core==[^\s;]+)", text, re.MULTILINE)
        if required:
            return required[1]
    return "pydantic-core"


def _commit() -> str:
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return git.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
