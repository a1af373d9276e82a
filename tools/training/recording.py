"""The journal of a process that trains, with events of its beginning and end.

The events say from where it resumed and with which changed keys, how it ended, and the memory that it took.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.resources import peak_memory
from tools.config.run_file import RunConfig
from tools.journal.journal import Journal
from tools.journal.trackers import Feed
from tools.training.corpus import Corpus
from tools.training.resume import resume_event


@contextmanager
def recorded(
    config: RunConfig, corpus: Corpus, resumed: Path | None, step: Callable[[], int], optimizer: ParallelAMPOptimizer
) -> Iterator[Journal]:
    """Yield the journal of a run and close it. A process that has no step to take records no event.

    resumed: the checkpoint from which the run resumes. step: returns the number of the last step that is known.
    """
    folder, total, log, begun = Path(config.train.folder), config.train.steps, config.log, step()
    feeds = [Feed(name, folder, config.model_dump(mode="json"), begun) for name in log.to]
    with Journal(folder, begun, total, log.every, log.progress, feeds) as journal:
        if begun >= total:
            yield journal
            return
        if resumed:
            journal.write_event(resume_event(config, corpus, resumed))
        why = ""
        try:
            yield journal
        except BaseException as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise
        finally:
            journal.write_event(_end_event(step(), total, why, optimizer))


def _end_event(step: int, total: int, why: str, optimizer: ParallelAMPOptimizer) -> dict[str, Any]:
    complete = step >= total
    on_gpu = torch.cuda.is_initialized()
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory()
    return {
        "event": "end",
        "step": step,
        "complete": complete,
        "why": why or ("all steps are taken" if complete else "it was asked to stop"),
        "peak_memory": peak,
        "memory_of": "device" if on_gpu else "process",
        "held_memory": sum(buffer.num_bytes() for buffer in optimizer.all_buffers()),
    }
