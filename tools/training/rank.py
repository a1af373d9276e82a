"""One rank of a training run, from its entry into the world until all steps are taken."""

from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.diagnose.position import Phase, Position
from models.attention.backends import gpu_kernels
from parallel.described_world import read_number
from parallel.hangs.watchdog import longest_wait
from parallel.mesh import broadcast_from_first, make_mesh, world
from tools.config.run_file import RunConfig
from tools.parts import optional_parts
from tools.training.elastic import (
    in_this_world,
    is_spare,
    publish_end_reason,
    record_restart,
    release_spares,
    require_fresh_store,
    require_no_ended_ranks,
    stand_by,
)
from tools.training.hangs import print_waiting, straggler_events, watching
from tools.training.launched import share_of_cores
from tools.training.machine import (
    bound_product_caches,
    device_of_run,
    keep_freed_memory,
    local_ranks,
)
from tools.training.prepared_files import open_prepared
from tools.training.stopping import note_failure
from tools.training.trainer import Trainer


def train_rank(
    config: RunConfig, export_folder: Path | None, allowed: Collection[str], verify: bool
) -> Trainer | None:
    """Train as one rank of the world that the process joins; return the trainer, on ranks other
    than the first None.

    export_folder: where the model is exported afterwards, None if it is not. allowed: see
    `check_resumable`. verify: compare the models that are read and exported with transformers.
    """
    # torchrun may keep the addresses of ranks that it has restarted since.
    require_fresh_store(config)
    started_ranks = read_number("WORLD_SIZE", default="1")
    # With parallel.elastic, the layout follows from the ranks that are there; others stand by.
    config = in_this_world(config)
    if is_spare(config):
        stand_by()
        return None
    device = device_of_run(config)
    config = config.on_device(device)
    torch.set_num_threads(config.train.threads or share_of_cores(local_ranks(config)))
    # Steps allocate and free the same sizes over and over.
    keep_freed_memory()
    bound_product_caches()
    position = Position()
    parallel = config.parallel
    with (
        # A wait longer than any phase, so that the watchdog acts first and names the culprit.
        world(device, longest_wait(parallel.timeout) / 60, note_failure) as store,
        gpu_kernels(device, config.train.deterministic),
        ExitStack() as locks,
        watching(
            Path(config.train.folder),
            store,
            position,
            parallel.timeout,
            peers=parallel.tensor * parallel.copies,
        ) as watchdog,
    ):
        mesh = make_mesh(
            parallel.pipeline, parallel.data, parallel.tensor, device, parallel.context
        )
        is_first = dist.get_rank() == 0
        publish_end_reason(store)
        position.enter(Phase.PREPARATION if is_first else Phase.WAITING)

        def prepare_run() -> dict[str, Any]:
            require_no_ended_ranks(store)
            prepared = optional_parts.prepare(config, locks, allowed, export_folder, verify)
            # only of a run that has passed all checks
            record_restart(config)
            return prepared

        prepared = broadcast_from_first(store, prepare_run, partial(print_waiting, watchdog))
        position.enter(Phase.LOADING)
        position.note_action("opening of data and checkpoint")
        corpus, checkpoint = open_prepared(config, prepared)
        trainer = Trainer(
            config,
            corpus,
            mesh,
            checkpoint,
            position=position,
            straggler_events=partial(straggler_events, watchdog),
        )
        trainer.run()
        if is_first:  # spares may go only once the run has ended well
            release_spares(store, range(config.world_size, started_ranks))
    return trainer if is_first else None
