"""Memory of programs whose memory must not grow with their input: tokenizing text and converting a
model.

    data       tokenize a JSONL file of the standard library's sources, repeated; all processes
               together
    convert    convert a Llama with random weights to a megaprec checkpoint, a Hugging Face and a
               Megatron folder, each in a process that has converted a small model before; the
               growth of its resident memory

Files are written to a temporary folder. Linux only: memory is read from /proc.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaprec.resources import status_bytes
from megaprec.text.sources import open_source
from tools.bench.measurement import add_integers, print_record
from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.core.source import Source
from tools.convert.core.target import Target, convert
from tools.convert.core.tensors import fill, reserve_safetensors
from tools.convert.formats import open_source as open_model
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.write import hf_target
from tools.convert.megatron.write import MegatronLayout, megatron_target
from tools.convert.native import native_target

INTERVAL = 0.3  # seconds between two samples of a program's memory
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
}
# from one folder to another; the folder "given" is a Hugging Face one, and later conversions read
# what the first has written
CONVERSIONS = (
    ("given", "megaprec"),
    ("megaprec", "hf"),
    ("given", "megatron"),
)
TARGETS: dict[str, Callable[[Source], Target]] = {
    "hf": lambda source: hf_target(source, None),
    "megaprec": lambda source: native_target(source, None),
    "megatron": lambda source: megatron_target(source, None, MegatronLayout()),
}
SUBJECT = "peak memory of data and convert"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("what", choices=("data", "convert"))
    add_integers(
        parser,
        {
            "megabytes": (1000, "of JSONL"),
            "vocab-size": (8192, "of its tokens"),
            "workers": (2, "that make them"),
            "layers": (6, "of the model; of 6 it has 2.0 GB"),
        },
    )
    parser.add_argument("--folder", type=Path, help="for the files; none: a temporary folder")


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench memory`; return the exit code."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.what == "data":
            print_record(_data(Path(folder), args))
        else:
            for record in _conversions(Path(folder), args.layers):
                print_record(record)
    return 0


def memory_by_process(pid: int, parent_report: str = "") -> dict[str, int]:
    """Return the bytes of memory of a process and of all its children, by pid.

    A page that several of them share is divided among them: just after a fork all pages are shared,
    and would otherwise count twice.

    parent_report: what the kernel says of the memory of the process that has started it. A process
        of which it says the same to the byte is in that memory (vfork) until it runs its own
        program, and does not count.
    """
    children: list[str] = []
    try:
        report = Path(f"/proc/{pid}/smaps_rollup").read_text()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += (thread / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}  # it has ended
    if report == parent_report:
        return {}
    sizes = {f"{pid}": 0}
    for line in report.splitlines():
        # The proportional set size, in units of 1024 bytes.
        if line.startswith("Pss:"):
            sizes[f"{pid}"] = int(line.split()[1]) * 1024
    for child in children:
        sizes |= memory_by_process(int(child), report)
    return sizes


def peak(command: list[str], interval: float = INTERVAL) -> tuple[int, int]:
    """Return the largest memory of a program and its children, and the number of samples. The
    program must succeed.

    A process counts from the second look at it: while one is being started (vfork), threads of its
    parent may change the memory that both are in between the looks at them, which would then count
    twice.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        largest = 0
        looks = 0
        before = dict[str, int]()
        while process.poll() is None:
            now = memory_by_process(process.pid)
            seen_twice = now.keys() & before.keys()
            largest = max(largest, sum(now[pid] for pid in seen_twice))
            looks += 1
            before = now
            time.sleep(interval)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
    return largest, looks


def _data(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of tokenizing a text."""
    text = folder / "text.jsonl"
    documents = _write_text(text, args.megabytes * 1_000_000)
    build = [sys.executable, "-m", "megaprec", "data", "build", str(text), str(folder / "tokens")]
    options = ["--vocab-size", str(args.vocab_size), "--workers", str(args.workers)]
    start = time.monotonic()
    largest, looks = peak([*build, *options])
    seconds = time.monotonic() - start
    return {
        "bytes": text.stat().st_size,
        "documents": documents,
        "tokens_bytes": (folder / "tokens.bin").stat().st_size,
        "workers": args.workers,
        "peak_bytes": largest,
        "looks": looks,
        "seconds": round(seconds),
    }


def _write_text(file: Path, size: int) -> int:
    """Write the standard library's sources repeatedly, up to `size` bytes; return the number of
    documents."""
    texts = [json.dumps({"text": text}) + "\n" for _, text in open_source("python")]
    written = 0
    documents = 0
    with file.open("w") as opened:
        for line in cycle(texts):
            if written >= size:
                return documents
            # a character is a byte: json.dumps escapes all others
            written += opened.write(line)
            documents += 1
    raise AssertionError("there are no sources")


def _conversions(folder: Path, layers: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each conversion."""
    _write_model(folder / "small" / "given", {**LLAMA, **SMALL})
    large = {**LLAMA, **LARGE, "num_hidden_layers": layers}
    size, largest = _write_model(folder / "large" / "given", large)
    # Not forked: the child would begin with the memory of this process.
    spawned = multiprocessing.get_context("spawn")
    for source_format, target_format in CONVERSIONS:
        with ProcessPoolExecutor(1, spawned) as process:
            growth = process.submit(_growth, folder, source_format, target_format)
            grown_bytes = growth.result()
        yield {
            "from": source_format,
            "to": target_format,
            "bytes": size,
            "largest_tensor": largest,
            "grew_bytes": grown_bytes,
        }


def _growth(folder: Path, source_format: str, target_format: str) -> int:
    """Return the growth of resident memory in bytes over that after the conversion of the small
    model."""
    # stdout is for the lines of JSON
    with redirect_stdout(sys.stderr):
        # what any conversion leaves, such as imported modules, is there before the large one
        _convert(folder / "small", source_format, target_format)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        before = status_bytes("VmRSS:")
        _convert(folder / "large", source_format, target_format)
    return status_bytes("VmHWM:") - before


def _convert(folder: Path, source_format: str, target_format: str) -> None:
    source = open_model(folder / source_format)
    convert(source, TARGETS[target_format](source), folder / target_format, lambda *progress: None)


def _write_model(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Write random FP32 weights, one tensor at a time; return the bytes of all and of the
    largest."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # the rules of the converter say which tensors such a folder has
    tensors = matches(HUGGING_FACE["llama"], from_hugging_face(config))
    shapes = {tensor.foreign: tensor.shape for tensor in tensors}
    file = folder / "model.safetensors"
    forms = {name: (torch.float32, shape) for name, shape in shapes.items()}
    starts = reserve_safetensors(file, forms, True)
    for name, shape in shapes.items():
        fill(file, starts[name], torch.randn(shape))
    sizes = [4 * prod(shape) for shape in shapes.values()]  # FP32
    return sum(sizes), max(sizes)
