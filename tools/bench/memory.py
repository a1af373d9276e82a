"""Memory of programs whose memory must not grow with their input: tokenizing text and converting a
model.

    data       tokenize a JSONL file of the standard library's sources, repeated; all processes together
    convert    convert a Llama with random weights to a megaprec checkpoint, a Hugging Face and a Megatron folder, each
               in a process that has converted a small model before; the growth of its resident
               memory

Files are written to a temporary folder. Linux only: memory is read from /proc.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaprec.data.text import open_source
from tools.commands.convert import write_model
from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.core.tensors import fill, reserve_safetensors
from tools.convert.formats import open_source as open_model
from tools.convert.hf.config import from_hugging_face

OFTEN = 0.3  # seconds between two looks
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
LLAMA |= {"max_position_embeddings": 2048, "hidden_act": "silu"}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
}
# folders; the first is a Hugging Face one
WAYS = (
    ("given", "megaprec"),
    ("megaprec", "hf"),
    ("given", "megatron"),
)


def add_parser(subparsers: Any) -> None:
    """Add `memory` to the measurements."""
    parser = subparsers.add_parser(
        "memory", help="peak memory of data and convert", description=__doc__
    )
    parser.add_argument("what", choices=("data", "convert"))
    parser.add_argument(
        "--megabytes", type=int, default=1000, metavar="N", help="of JSONL (default: 1000)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8192, metavar="N", help="of its tokens (default: 8192)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="that make them (default: 2)"
    )
    parser.add_argument(
        "--layers", type=int, default=6, metavar="N", help="of the model (default: 6, 2.0 GB)"
    )
    parser.add_argument(
        "--folder", type=Path, help="for the files (default: the system's for temporary ones)"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench memory`."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what == "data":
            print(json.dumps(_data(Path(folder), args)))
            return 0
        for record in _conversions(Path(folder), args.layers):
            print(json.dumps(record), flush=True)
    return 0


def held(pid: int, above: str = "") -> dict[str, int]:
    """Return the bytes of memory of a process and of all its children, by pid. A page that several
    of them share is divided among them: just after a fork all pages are shared, and would otherwise
    count twice.

    above: what the kernel says of the memory of the process that has started it. A process of which
    it says the same to the byte is in that memory (vfork) until it runs its own program, and does
    not count.
    """
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = [
            c
            for t in Path(f"/proc/{pid}/task").iterdir()
            for c in (t / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return {}  # it has ended
    if said == above:
        return {}
    sizes = {
        f"{pid}": next(
            (int(line.split()[1]) * 1024 for line in said.splitlines() if line.startswith("Pss:")),
            0,
        )
    }
    for child in children:
        sizes |= held(int(child), said)
    return sizes


def peak(command: list[str], often: float = OFTEN) -> tuple[int, int]:
    """Return the largest memory of a program and its children, and the number of samples. The
    program must succeed.

    A process counts from the second look at it: while one is being started (vfork), threads of its
    parent may change the memory that both are in between the looks at them, which would then count
    twice.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        largest = looks = 0
        before = dict[str, int]()
        while process.poll() is None:
            now = held(process.pid)
            largest = max(largest, sum(now[pid] for pid in now.keys() & before.keys()))
            looks = looks + 1
            before = now
            time.sleep(often)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
    return largest, looks


def _data(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    documents = _write_text(folder / "text.jsonl", args.megabytes * 1_000_000)
    command = [
        sys.executable,
        "-m",
        "megaprec",
        "data",
        "build",
        str(folder / "text.jsonl"),
        str(folder / "tokens"),
    ]
    options = ["--vocab-size", str(args.vocab_size), "--workers", str(args.workers)]
    began = time.monotonic()
    largest, looks = peak([*command, *options])
    took = time.monotonic() - began
    size = (folder / "text.jsonl").stat().st_size
    record = {
        "bytes": size,
        "documents": documents,
        "tokens_bytes": (folder / "tokens.bin").stat().st_size,
    }
    return {
        **record,
        "workers": args.workers,
        "peak_bytes": largest,
        "looks": looks,
        "seconds": round(took),
    }


def _write_text(file: Path, size: int) -> int:
    """Write the standard library's sources repeatedly, up to `size` bytes; return the number of
    documents."""
    texts = [json.dumps({"text": text}) + "\n" for _, text in open_source("python")]
    written = documents = 0
    with file.open("w") as opened:
        for line in cycle(texts):
            if written >= size:
                return documents
            written += opened.write(line)  # a character is a byte: json.dumps escapes all others
            documents += 1
    raise AssertionError("there are no sources")


def _conversions(folder: Path, layers: int) -> Iterator[dict[str, Any]]:
    for name, sizes in (("small", SMALL), ("large", {**LARGE, "num_hidden_layers": layers})):
        size, largest = _write_model(folder / name / "given", {**LLAMA, **sizes})
    spawned = multiprocessing.get_context("spawn")
    for origin, to in WAYS:
        with ProcessPoolExecutor(1, spawned) as process:
            grew = process.submit(_growth, folder, origin, to).result()
        yield {
            "from": origin,
            "to": to,
            "bytes": size,
            "largest_tensor": largest,
            "grew_bytes": grew,
        }


def _growth(folder: Path, origin: str, to: str) -> int:
    """Return the growth of resident memory in bytes over that after the conversion of the small
    model."""
    with redirect_stdout(sys.stderr):
        write_model(open_model(folder / "small" / origin), to, folder / "small" / to)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        before = _status("VmRSS:")
        write_model(open_model(folder / "large" / origin), to, folder / "large" / to)
    return _status("VmHWM:") - before


def _status(what: str) -> int:
    return int(Path("/proc/self/status").read_text().split(what)[1].split()[0]) * 1024


def _write_model(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Write random FP32 weights, one tensor at a time; return the bytes of all and of the
    largest."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        match.foreign: match.shape
        for match in matches(HUGGING_FACE["llama"], from_hugging_face(config))
    }
    file = folder / "model.safetensors"
    starts = reserve_safetensors(
        file, {name: (torch.float32, shape) for name, shape in shapes.items()}, True
    )
    for name, shape in shapes.items():
        fill(file, starts[name], torch.randn(shape))
    sizes = [4 * prod(shape) for shape in shapes.values()]
    return sum(sizes), max(sizes)
