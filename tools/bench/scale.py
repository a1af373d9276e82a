"""Measurements of the start of a rank among very many, and of their messages, in worlds and data
that are not there.

    groups     process groups of a mesh in torch's fake world: calls, CPU seconds
    messages   texts of all ranks, exchanged in memory: seconds of CPU, and bytes that travel
    weights    initial weights: nanoseconds of one thread per number
    data       a data set of holes with the record of its check: seconds and memory to open it and
               read a batch

Each line is one measurement. Seconds are of this process' CPU, so they hold on a busy machine too.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.groups import make_groups
from megaprec.comm.layout import Part
from megaprec.comm.random import normal_part
from megaprec.data.files import with_suffix
from megaprec.data.index_check import Checked
from megaprec.data.indexed import HEADER, LONGEST_SEQUENCE, MAGIC, IndexedDataset
from megaprec.data.samples import Samples
from parallel.mesh import make_mesh
from parallel.pipeline.builders import schedule
from parallel.pipeline.p2p import CPU, P2P
from tools.bench.measurement import add_integers, print_record

SUBJECT = "start and messages of very many ranks"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_integers(
        parser,
        {
            "pipeline": (8, "ranks of a pipeline"),
            "data": (256, "replicas"),
            "tensor": (8, "tensor ranks"),
            "tokens": (10**13, "of the data set"),
        },
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench scale`."""
    for record in _records(args):
        print_record(record)
    return 0


def _records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ranks = args.pipeline * args.data * args.tensor
    groups = _timed(lambda: _make_groups(args.pipeline, args.data, args.tensor))
    yield {"what": "groups", "ranks": ranks, **groups}
    for different in (1, args.pipeline, ranks):
        exchange = _exchange(ranks, different)
        yield {"what": "messages", "ranks": ranks, "different": different, **exchange}
    torch.set_num_threads(1)
    weights = _timed(_draw_weights)
    nanoseconds = weights["cpu_s"] / weights["numbers"] * 1e9
    yield {"what": "weights", **weights, "ns": nanoseconds}
    with tempfile.TemporaryDirectory() as folder:
        prefix = sparse_set(Path(folder), args.tokens, args.tokens // 1000)
        yield {"what": "data", "tokens": args.tokens, **_timed(lambda: _open(prefix))}


def _draw_weights() -> dict[str, Any]:
    weights = normal_part(Part("w", (4096, 4096)), 0, 0.02, torch.bfloat16)
    return {"numbers": weights.numel()}


def _timed(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a job with its seconds of CPU time."""
    start = time.process_time()
    record = job()
    return {**record, "cpu_s": time.process_time() - start}


def _make_groups(pipeline_ranks: int, replicas: int, tensor_ranks: int) -> dict[str, Any]:
    """Make all groups that a rank of a run may need, in a world of which only this rank is
    there."""
    # torch's backend for tests: groups are made, and nothing is sent.
    dist.init_process_group("fake", rank=0, world_size=pipeline_ranks * replicas * tensor_ranks)
    try:
        mesh = make_mesh(pipeline_ranks, replicas, tensor_ranks)
        Axis.stage(mesh, separate_group=True)
        Axis.of(mesh, "dp").subaxis(max(1, replicas // 2), "zero")
        pipelines = Axis.of(mesh, "pp")
        if pipelines.rank_groups is not None and pipeline_ranks > 1:
            make_groups(pipelines.rank_groups[:, [0, pipeline_ranks - 1]])  # a tied head
        # An interleaved schedule also sends from the last rank to the first.
        if pipeline_ranks > 1:
            chunks = schedule("interleaved", pipeline_ranks, 2 * pipeline_ranks, 2)
        else:
            chunks = schedule("1f1b", 1, 2, 0)
        P2P.open(pipelines, chunks.rank_of_stage, (1,), torch.float32, CPU, "order")
        groups = len(dist.distributed_c10d._world.pg_names)
        return {"calls": groups - 1}  # the world itself is one, which no call has made
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Memory(Axis):
    """Rank 0 of a world whose other ranks say what is given; counts the bytes of every
    collective."""

    announced: Tensor = field(default_factory=lambda: torch.zeros(0))
    texts: bytes = b""
    moved: list[int] = field(default_factory=list)

    def gather(self, tensor: Tensor) -> Tensor:
        if not len(self.announced):  # of the first call, which asks how a text is announced
            object.__setattr__(self, "announced", tensor)
        self.moved.append(self.announced.nbytes)
        return self.announced

    def sum_(self, tensor: Tensor) -> Tensor:
        start = sum(self.moved[1:])
        self.moved.append(tensor.nbytes)
        text = bytearray(self.texts[start : start + len(tensor)])
        return tensor.copy_(torch.frombuffer(text, dtype=torch.uint8))


def _announced(value: dict[str, Any]) -> Tensor:
    """Return what a rank tells the others of its text before it is sent."""
    lonely_world = _Memory("world", 0, 1, texts=json.dumps(value).encode())
    gather_entries(value, lonely_world, CPU)
    return lonely_world.announced


def _exchange(ranks: int, different: int) -> dict[str, Any]:
    """Exchange a text of every rank, of which `different` are not equal to another."""
    values = [{f"layers.{number}.weight": [0.125, 2.0, 3.0]} for number in range(different)]
    announcements = [_announced(value) for value in values]
    of_ranks = [announcements[rank * different // ranks] for rank in range(ranks)]
    texts = b"".join(json.dumps(value).encode() for value in values)
    world = _Memory("world", 0, ranks, announced=torch.cat(of_ranks), texts=texts)
    record = _timed(lambda: {"entries": len(gather_entries(values[0], world, CPU))})
    return {**record, "bytes": sum(world.moved)}


def _open(prefix: Path) -> dict[str, Any]:
    """Open a data set and read a batch; return its documents and the growth of memory in MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = IndexedDataset(prefix)
    Samples(dataset, 4096, 0, True).batch(0, 8)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KiB, on Linux
    return {"documents": dataset.num_documents, "mb": grown * 1024 / 1e6}


def sparse_set(folder: Path, tokens: int, documents: int) -> Path:
    """Write a set of one byte a token that is all holes, but for the index of its last sequences,
    and the record of its check. Return its prefix.

    The sequences before the last ones are empty, and so are all documents but the last.
    """
    prefix = folder / "sparse"
    lengths = np.diff(np.append(np.arange(0, tokens, LONGEST_SEQUENCE), tokens))
    starts = np.cumsum(lengths) - lengths
    # an index is a header, then for each sequence its length (4 bytes) and start (8 bytes), then
    # the first sequence of each document (8 bytes)
    pointers_at = HEADER.size + 4 * documents
    documents_at = pointers_at + 8 * documents
    at_the_end = {
        pointers_at - 4 * len(lengths): lengths.astype("<i4"),
        documents_at - 8 * len(lengths): starts.astype("<i8"),
        documents_at + 8 * documents: np.array([documents], "<i8"),
    }
    with with_suffix(prefix, ".bin").open("wb") as file:
        file.truncate(tokens)
    with with_suffix(prefix, ".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 1, documents, documents + 1))
        for offset, values in at_the_end.items():
            file.seek(offset)
            file.write(values.tobytes())
    index = os.stat(with_suffix(prefix, ".idx"))
    checked = Checked(index.st_size, index.st_mtime_ns, tokens, "0" * 64)
    with_suffix(prefix, ".checked").write_text(json.dumps(asdict(checked)))
    return prefix
