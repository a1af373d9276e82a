"""Runs a function on several ranks at once, as if it were one process: `@on_ranks(pp=2, tp=2)` over
a test.

Ranks are forked from one server that has already imported torch and all of ours, so a four-rank
test takes about 0.3 s and not the 5 s of four fresh interpreters. Each rank joins a gloo world on
the CPU, gets the mesh as first argument, treats warnings as the test that started it does, and
sends what it returns or raises back through a pipe. It then stays until every rank has answered:
had it left, the others would fail on a broken connection and hide who failed first. A rank still at
work after `SECONDS` writes where it stands and ends itself, so a hang is a failed test with the
stacks of all ranks. Nothing outlives a test even if the test itself is killed: the server ends with
the process that started it, and ranks with the server.

A module of bodies that needs another package of some seconds to import, such as megatron-core,
names it in `PRELOADED`: the server then imports it once, in place of every rank.
"""

import ctypes
import faulthandler
import functools
import importlib
import inspect
import math
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaprec.comm.axis import AXES
from megaprec.comm.gloo_threads import waiting_their_turn
from parallel.mesh import make_mesh
from tests.uninitialized import spoil_uninitialized_memory

SECONDS = 600.0  # the longest that a test may take, on a machine that does much else
GRACE = 1.0  # how long other ranks may still answer once one has failed
_server = multiprocessing.get_context("forkserver")
# Each of these would take each rank another half second or more. The second is what torch imports
# at the first backward from a given gradient, the third at the first step of training, the fourth
# is most of torch.distributed.
_imported = [
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]
# What many modules of bodies import, and each rank would otherwise import with them.
_imported += ["transformers", "transformers.models.llama.modeling_llama"]
_imported += ["pytest", "hypothesis"]
_imported += ["tests.families", "tests.layouts", "tests.models.test_parity", "tests.runs"]
LAST = "tests.frozen"
PR_SET_PDEATHSIG = 1
_server.set_forkserver_preload([*_imported, LAST])


def on_ranks(**axes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of `body(mesh, **arguments)` that runs on every rank of the mesh with these axis
    sizes.

    Axes pp, dp, cp and tp, one where not given. Arguments are the test's parameters and fixtures,
    pickled.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_ranks(body, axes, **arguments)

        signature = inspect.signature(body)
        without_mesh = signature.replace(parameters=list(signature.parameters.values())[1:])
        test.__signature__ = without_mesh  # pyright: ignore[reportAttributeAccessIssue]  # what pytest asks for
        return test

    return decorate


def run_ranks(
    body: Callable[..., Any],
    axes: Mapping[str, int],
    seconds: float | None = None,
    /,
    **arguments: Any,
) -> list[Any]:
    """What `body(mesh, **arguments)` returns on each rank, by rank. `body` is a function of a
    module, no closure.

    Fails the test with the traceback of each rank that failed. Values come back by pickle, tensors
    included.
    """
    _preload(getattr(sys.modules[body.__module__], "PRELOADED", ()))
    with tempfile.TemporaryDirectory() as folder:
        name = (body.__module__, body.__qualname__)
        job = _Job(
            name, dict(axes), arguments, Path(folder), seconds or SECONDS, warnings.filters[:]
        )
        ranks = [_start(job, rank) for rank in range(job.world)]
        try:
            answers = _collect(job, [connection for _, connection in ranks])
        finally:
            _end(ranks)
    failures = [
        f"--- rank {r} ---\n{answer.error}" for r, answer in sorted(answers.items()) if answer.error
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [answers[rank].value for rank in range(job.world)]


@dataclass(frozen=True)
class _Job:
    """What every rank is told."""

    name: tuple[str, str]  # of the body: its module and its place there
    axes: dict[str, int]
    arguments: dict[str, Any]
    folder: Path
    seconds: float
    filters: Sequence[Any]

    @property
    def world(self) -> int:
        return math.prod(self.axes.values())

    def stack(self, rank: int) -> Path:
        return self.folder / f"stack{rank}"


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str = ""


def _preload(modules: Sequence[str]) -> None:
    """Has the server import these before it forks, starting it anew unless it has."""
    if new := [module for module in modules if module not in _imported]:
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
        _imported.extend(new)
        _server.set_forkserver_preload([*_imported, LAST])


def _start(job: _Job, rank: int) -> tuple[ForkServerProcess, Connection]:
    ours, theirs = _server.Pipe()
    process = _server.Process(target=_rank, args=(job, rank, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return process, ours


def _end(ranks: Sequence[tuple[ForkServerProcess, Connection]]) -> None:
    for _, connection in ranks:
        connection.close()  # a rank that has answered waits for this
    deadline = time.monotonic() + GRACE
    for process, _ in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _collect(job: _Job, connections: Sequence[Connection]) -> dict[int, _Answer]:
    """The answers of all ranks; of those that came in time, once one is a failure."""
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + job.seconds + 30 * GRACE  # ranks end themselves before
    while waiting and (ready := wait(list(waiting), deadline - time.monotonic())):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            answers[rank] = _answer(job, rank, connection)
            if answers[rank].error:
                deadline = min(deadline, time.monotonic() + GRACE)
    if any(answer.error for answer in answers.values()):
        return answers
    return answers | {rank: _Answer(error="gave no answer") for rank in waiting.values()}


def _answer(job: _Job, rank: int, connection: Connection) -> _Answer:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        stack = job.stack(rank).read_text() if job.stack(rank).exists() else ""
        return _Answer(
            error=f"not done after {job.seconds:g} s:\n{stack}" if stack else "the process died"
        )


def _end_with_the_server() -> None:
    """Has this rank killed when its server ends, which ends as soon as no other process holds one
    end of a pipe.

    Each rank is given that end too, for children of its own: it lets go of it.
    """
    server = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # pyright: ignore[reportAttributeAccessIssue]
    server._forkserver_alive_fd = None  # pyright: ignore[reportAttributeAccessIssue]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank(job: _Job, rank: int, connection: Connection) -> None:
    _end_with_the_server()
    with job.stack(rank).open("w") as stack:
        faulthandler.dump_traceback_later(job.seconds, exit=True, file=stack)
        try:
            packed = pickle.dumps(_Answer(_run(job, rank)))
        except BaseException:  # a failed assertion as well as pytest's own outcomes
            packed = pickle.dumps(_Answer(error=traceback.format_exc()))
        connection.send_bytes(packed)
        with suppress(EOFError):
            connection.recv_bytes()
        faulthandler.cancel_dump_traceback_later()


def _run(job: _Job, rank: int) -> Any:
    torch.set_num_threads(1)
    spoil_uninitialized_memory()
    random.seed(0)  # torch's own seed is the same in every process
    np.random.seed(0)
    store = dist.FileStore(str(job.folder / "store"), job.world)
    with waiting_their_turn():
        dist.init_process_group("gloo", rank=rank, world_size=job.world, store=store)
    pp, dp, cp, tp = (job.axes.get(axis, 1) for axis in AXES)
    mesh = make_mesh(pp, dp, tp, cp=cp)
    module, place = job.name
    body = inspect.unwrap(
        functools.reduce(getattr, place.split("."), importlib.import_module(module))
    )
    warnings.resetwarnings()
    warnings.filters[:] = job.filters  # pyright: ignore[reportIndexIssue]  # a list, though typed as any sequence
    return body(mesh, **job.arguments)
