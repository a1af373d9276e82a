"""Measurements of the start of a rank among very many, and of their messages, in worlds and data
that are not there.

    groups     process groups of a mesh in torch's fake world: calls, CPU seconds
    messages   texts of all ranks, exchanged in memory: seconds of CPU, and bytes that travel
    weights    initial weights: nanoseconds of one thread per number
    data       a sparse file as a data set, with the record of its check: seconds and memory to open
               it and read a batch

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
from megaprec.tokens.files import with_suffix
from megaprec.tokens.index_check import Checked
from megaprec.tokens.indexed import HEADER, LONGEST_SEQUENCE, MAGIC, VERSION, IndexedDataset
from megaprec.tokens.samples import Samples
from parallel.mesh import make_mesh
from parallel.pipeline.kinds import schedule
from parallel.pipeline.p2p import CPU, P2P
from tools.bench.measurement import add_integers, print_record

SUBJECT = "start and messages of very many ranks"
UINT8_CODE = 1  # of ids, in the header of an index


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
    """Run `python -m tools.bench scale`; return the exit code."""
    for record in _records(args):
        print_record(record)
    return 0


def _records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of each measurement."""
    ranks = args.pipeline * args.data * args.tensor
    groups = _timed(lambda: _make_groups(args.pipeline, args.data, args.tensor))
    yield {"what": "groups", "ranks": ranks, **groups}
    # all ranks say the same, those of a stage do, or none do
    for num_texts in (1, args.pipeline, ranks):
        exchange = _exchange(ranks, num_texts)
        yield {"what": "messages", "ranks": ranks, "different": num_texts, **exchange}
    torch.set_num_threads(1)
    weights = _timed(_draw_weights)
    nanoseconds = weights["cpu_s"] / weights["numbers"] * 1e9
    yield {"what": "weights", **weights, "ns": nanoseconds}
    with tempfile.TemporaryDirectory() as folder:
        num_documents = args.tokens // 1000  # of 1,000 tokens each
        prefix = sparse_set(Path(folder), args.tokens, num_documents)
        opened = _timed(lambda: _open(prefix))
        yield {"what": "data", "tokens": args.tokens, **opened}


def _draw_weights() -> dict[str, Any]:
    """Draw the initial weights of one matrix; return how many numbers it has."""
    matrix = Part("w", (4096, 4096))
    weights = normal_part(matrix, 0, 0.02, torch.bfloat16)
    return {"numbers": weights.numel()}


def _timed(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a job with its seconds of CPU time."""
    start = time.process_time()
    record = job()
    cpu_seconds = time.process_time() - start
    return {**record, "cpu_s": cpu_seconds}


def _make_groups(pipeline_ranks: int, replicas: int, tensor_ranks: int) -> dict[str, Any]:
    """Make all process groups that a rank of a run may need, in a world of which only this rank is
    there; return how many calls made one."""
    # torch's backend for tests: groups are made, and nothing is sent.
    world_size = pipeline_ranks * replicas * tensor_ranks
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        mesh = make_mesh(pp=pipeline_ranks, dp=replicas, tp=tensor_ranks)
        Axis.stage(mesh, separate_group=True)
        # state that is shared by half of the replicas, the case with a group of its own
        sharers = max(1, replicas // 2)
        Axis.of(mesh, "dp").subaxis(sharers, "zero")
        pipelines = Axis.of(mesh, "pp")
        if pipelines.rank_groups is not None and pipeline_ranks > 1:
            # the ends of each pipeline share the weight of a tied head
            ends = [0, pipeline_ranks - 1]
            make_groups(pipelines.rank_groups[:, ends])
        # An interleaved schedule also sends from the last rank to the first.
        if pipeline_ranks > 1:
            passes = schedule("interleaved", pipeline_ranks, 2 * pipeline_ranks, chunks=2)
        else:
            passes = schedule("1f1b", ranks=1, microbatches=2)
        P2P.open(pipelines, passes.rank_of_stage, (1,), torch.float32, CPU, "order")
        # torch has no public count of groups
        groups = len(dist.distributed_c10d._world.pg_names)
        return {"calls": groups - 1}  # the world itself is one, which no call has made
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _PlayedWorld(Axis):
    """Rank 0 of a world whose other ranks are not there: collectives return what these would send.

    announcements: of all ranks, as `gather_entries` gathers them; empty: rank 0 is alone, and its
        own is noted here.
    texts: the different texts of all ranks, joined.
    moved_bytes: of every collective.
    """

    announcements: Tensor = field(default_factory=lambda: torch.zeros(0))
    texts: bytes = b""
    moved_bytes: list[int] = field(default_factory=list)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the announcements of all ranks, whatever this rank sends."""
        if not len(self.announcements):
            # an axis is frozen
            object.__setattr__(self, "announcements", tensor)
        self.moved_bytes.append(self.announcements.nbytes)
        return self.announcements

    def sum_(self, tensor: Tensor) -> Tensor:
        """Return a uint8 tensor, filled with the next bytes of the texts of all ranks."""
        # The first collective gathers announcements; then each sum joins the next bytes of texts.
        start = sum(self.moved_bytes[1:])
        self.moved_bytes.append(tensor.nbytes)
        chunk = bytearray(self.texts[start : start + len(tensor)])
        next_bytes = torch.frombuffer(chunk, dtype=torch.uint8)
        return tensor.copy_(next_bytes)


def _announcement(entries: dict[str, Any]) -> Tensor:
    """Return the tensor that `gather_entries` gathers from each rank before texts are sent."""
    text = json.dumps(entries).encode()
    lonely_world = _PlayedWorld("world", 0, 1, texts=text)
    gather_entries(entries, lonely_world, CPU)
    return lonely_world.announcements


def _exchange(ranks: int, num_texts: int) -> dict[str, Any]:
    """Exchange a text of every rank, of which `num_texts` are different; return the number of
    entries, CPU seconds, and bytes that travel."""
    different = [{f"layers.{number}.weight": [0.125, 2.0, 3.0]} for number in range(num_texts)]
    announcements = [_announcement(entries) for entries in different]
    # neighbours have the same text, so texts are joined in the order of their last ranks
    of_ranks = [announcements[rank * num_texts // ranks] for rank in range(ranks)]
    texts = b"".join(json.dumps(entries).encode() for entries in different)
    world = _PlayedWorld("world", 0, ranks, announcements=torch.cat(of_ranks), texts=texts)

    def gather_all() -> dict[str, Any]:
        """Gather the entries of all ranks on the first; return how many there are."""
        entries = gather_entries(different[0], world, CPU)
        return {"entries": len(entries)}

    record = _timed(gather_all)
    return {**record, "bytes": sum(world.moved_bytes)}


def _open(prefix: Path) -> dict[str, Any]:
    """Open a data set and read a batch; return its documents and the growth of memory in MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = IndexedDataset(prefix)
    samples = Samples(dataset, seq_length=4096, seed=0, shuffle=True)
    samples.batch(0, 8)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown_kib = after - before  # KiB, on Linux
    megabytes = grown_kib * 1024 / 1e6
    return {"documents": dataset.num_documents, "mb": megabytes}


def sparse_set(folder: Path, tokens: int, documents: int) -> Path:
    """Write a set of one byte a token as sparse files, which take no room on the disk but for the
    index of the last sequences, and the record of its check. Return its prefix.

    The sequences before the last ones are empty, and so are all documents but the last.
    """
    prefix = folder / "sparse"
    # as few sequences as hold all tokens
    borders = np.append(np.arange(0, tokens, LONGEST_SEQUENCE), tokens)
    lengths = np.diff(borders)
    starts = np.cumsum(lengths) - lengths
    # an index is a header, then for each sequence its length (4 bytes) and start (8 bytes), then
    # the first sequence of each document (8 bytes)
    pointers_at = HEADER.size + 4 * documents
    documents_at = pointers_at + 8 * documents
    # by the byte that each begins at: the last entries of the three tables
    num_sequences = len(lengths)
    written_arrays = {
        pointers_at - 4 * num_sequences: lengths.astype("<i4"),
        documents_at - 8 * num_sequences: starts.astype("<i8"),
        documents_at + 8 * documents: np.array([documents], "<i8"),
    }
    with with_suffix(prefix, ".bin").open("wb") as file:
        file.truncate(tokens)
    index_file = with_suffix(prefix, ".idx")
    with index_file.open("wb") as file:
        header = HEADER.pack(MAGIC, VERSION, UINT8_CODE, documents, documents + 1)
        file.write(header)
        for offset, values in written_arrays.items():
            file.seek(offset)
            file.write(values.tobytes())
    index = os.stat(index_file)
    # no digest of terabytes: opening a set compares sizes and times only
    checked = Checked(index.st_size, index.st_mtime_ns, tokens, sha256="0" * 64)
    record_file = with_suffix(prefix, ".checked")
    record_file.write_text(json.dumps(asdict(checked)))
    return prefix
