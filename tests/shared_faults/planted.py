"""Plants a fault in this process and in all ranks that it has forked.

As a plugin of pytest (`-p tests.shared_faults.planted`) it plants the one that MEGAPREC_FAULT names.
"""

import os
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import tests.ranks
from tests.project import forked_command
from tests.shared_faults.faults import FAULTS

VARIABLE = "MEGAPREC_FAULT"
rank_without_fault = tests.ranks._rank


def plant(name: str) -> None:
    """Plant a fault here, in ranks of `tests.ranks` and in commands of forked processes."""
    FAULTS[name].plant()
    os.environ[VARIABLE] = name
    setattr(tests.ranks, "_rank", partial(planted_rank, name))  # noqa: B010
    forked_command.LATE.append(__name__)


def planted_rank(name: str, job: Any, rank: int, connection: Connection) -> None:
    """As `tests.ranks._rank`, with a fault."""
    FAULTS[name].plant()
    rank_without_fault(job, rank, connection)


if os.environ.get(VARIABLE):
    plant(os.environ[VARIABLE])
