"""Tasks of lm-evaluation-harness during training, as `data.lm_eval` names them.

The harness runs on rank 0 alone. All ranks compute what it asks for, in the layout and precision of
the run: rank 0 sends them the samples, and they wait for these until it has finished. Training
waits for all of it.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.data.tokenizer import Tokenizer
from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from models.engine import Engine
from models.relay import Relay
from tools.config.data_settings import Data
from tools.config.run_file import RunConfig
from tools.journal.records import TASKS
from tools.text.likelihood import likelihoods
from tools.text.windows import Window, windows
from tools.training.corpus import Corpus

FEWSHOT_SEED = 1234  # the harness's own
Ask = Callable[[Sequence[Window]], list[tuple[float, bool]]]


def require_harness(config: RunConfig) -> None:
    """Raise UserError if the harness is not installed, or a task of data.lm_eval is not there or
    needs other answers than probabilities. Loads the tasks, and their data if the harness has to
    download them.
    """
    if not config.data.lm_eval:
        return
    if find_spec("lm_eval") is None:
        raise UserError(
            "data.lm_eval needs lm-evaluation-harness: pip install 'lm-eval>=0.4.13,<0.5'"
        )
    if config.data.lm_eval_folder and not Path(config.data.lm_eval_folder).is_dir():
        raise UserError(f'data.lm_eval_folder = "{config.data.lm_eval_folder}": no such folder')
    manager = _manager(config.data)
    data = config.data
    there = set(manager.all_tasks)
    if missing := [name for name in data.lm_eval if name not in there]:
        if data.lm_eval_folder:
            where = f" nor in {data.lm_eval_folder}"
        else:
            where = "; data.lm_eval_folder names those of own"
        raise UserError(
            *(f'data.lm_eval = "{name}": no such task in the harness{where}' for name in missing)
        )
    for name in data.lm_eval:
        try:
            tasks = _loaded(manager, [name])["tasks"]
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f'data.lm_eval = "{name}": the harness cannot load it: {why}'
            ) from error
        if writes := [task for task, one in tasks.items() if one.OUTPUT_TYPE == "generate_until"]:
            why = "has the model write text, which is not done during training"
            raise UserError(
                f'data.lm_eval = "{name}": {writes[0]} {why}; evaluate exported checkpoints'
            )


class Harness:
    """The tasks of a run. `results` is collective over its ranks."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, engine: Engine, position: Position
    ) -> None:
        self._data = config.data
        self._engine = engine
        self._position = position
        schedule = engine.schedule
        world = engine.optimizer.world
        self._relay = Relay(
            engine.stages, schedule.rank_of_stage, engine.pp, engine.dp, world, engine.device
        )
        if not self._data.lm_eval:
            return
        if corpus.tokenizer is None:
            raise UserError("data.lm_eval needs the run's tokenizer: data.tokenizer")
        if corpus.documents.begin is None:
            raise UserError(
                "data.lm_eval needs a token that stands before documents in training, and there "
                "is none: set data.begin, or build the data with a tokenizer that has a token to "
                "end documents with"
            )
        self._tokenizer = corpus.tokenizer
        self._begin = corpus.documents.begin
        self._positions = config.sized_model.max_positions

    @cached_property
    def _tasks(self) -> Any:
        return _loaded(_manager(self._data), self._data.lm_eval)

    @cached_property
    def _model(self) -> Any:
        return _language_model(self._ask, self._tokenizer, self._begin, self._positions)

    def results(self) -> dict[str, float]:
        """Return the fields of metrics.jsonl, on rank 0: lm_eval/TASK/METRIC. A harness that fails
        is a warning."""
        if not self._data.lm_eval:
            return {}
        self._engine.optimizer.wait()
        if self._relay.world.rank:
            while asked := _sent(self._relay, []):
                self._answer(asked)
            return {}
        try:
            with _quiet():
                return _fields(self._evaluate())
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(
                f"warning    no results of data.lm_eval: {why}; training goes on",
                file=sys.stderr,
                flush=True,
            )
            return {}
        finally:
            _sent(self._relay, [])

    def _evaluate(self) -> Mapping[str, Mapping[str, Any]]:
        self._position.at("tasks of lm-evaluation-harness")
        options = {
            "limit": self._data.lm_eval_limit or None,
            "bootstrap_iters": 0,
            "log_samples": False,
        }
        return import_module("lm_eval.evaluator").evaluate(self._model, self._tasks, **options)[
            "results"
        ]

    def _ask(self, samples: Sequence[Window]) -> list[tuple[float, bool]]:
        return self._answer(_sent(self._relay, samples)) if samples else []

    def _answer(self, samples: Sequence[Window]) -> list[tuple[float, bool]]:
        return likelihoods(
            self._relay, samples, lambda _: self._position.at("tasks of lm-evaluation-harness")
        )


def _sent(model: Relay, samples: Sequence[Window]) -> list[Window]:
    """Return rank 0's samples on all ranks; none: there are no more."""
    if model.world.group is None:
        return [*samples]
    sizes = [number for one in samples for number in (len(one.tokens), one.first)]
    ids = [one for sample in samples for one in (sample.tokens, sample.targets)]
    head = torch.tensor([len(sizes), sum(map(len, ids))], device=model.device)
    dist.broadcast(head, 0, group=model.world.group)
    count, total = head.tolist()
    if not count:
        return []
    if samples:
        flat = np.concatenate([np.array(sizes, np.int64), *ids])
    else:
        flat = np.zeros(count + total, np.int64)
    values: Tensor = torch.from_numpy(flat).to(model.device)
    dist.broadcast(values, 0, group=model.world.group)
    said = values.cpu().numpy()
    made = list[Window]()
    start = count
    for length, first in said[:count].reshape(-1, 2).tolist():
        tokens, targets = said[start : start + 2 * length].reshape(2, length)
        made.append(Window(tokens, targets, first))
        start += 2 * length
    return made


def _fields(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of each task by the name of their field, without those of a filter's name
    "none"."""
    fields = dict[str, float]()
    for task, metrics in results.items():
        for said, value in metrics.items():
            metric, _, kept = said.partition(",")
            if (
                isinstance(value, int | float)
                and not metric.endswith("_stderr")
                and metric != "sample_len"
            ):
                fields[f"{TASKS}{task}/{metric}{'' if kept in ('', 'none') else f'/{kept}'}"] = (
                    float(value)
                )
    return fields


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's bars off the log, and its warnings, which `require_harness` has shown
    before the run."""
    task: Any = import_module("lm_eval.api.task")
    log = logging.getLogger("lm_eval")
    bar = task.tqdm
    level = log.level
    task.tqdm = partial(bar, disable=True)
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        task.tqdm = bar
        log.setLevel(level)


def _manager(data: Data) -> Any:
    return import_module("lm_eval.tasks").TaskManager(include_path=data.lm_eval_folder or None)


def _loaded(manager: Any, names: Sequence[str]) -> Any:
    """Return tasks as the harness's evaluation takes them. Examples before a question are the same
    at every step."""
    loaded = manager.load([*names])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def _language_model(ask: Ask, tokenizer: Tokenizer, begin: int, positions: int) -> Any:
    """Return the harness's view of the model: its tokens, and the probabilities that `ask` returns.

    begin: id of the token before a document, as in training. Long documents are cut as the harness
        cuts them.
    """

    class Model(import_module("lm_eval.api.model").TemplateLM):
        eot_token_id = begin

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return tokenizer.encode(string)

        def loglikelihood(
            self, requests: Any, disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            return ask(
                [_after(context, continuation, positions) for _, context, continuation in requests]
            )

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [np.array(tokenizer.encode(request.args[0]), np.int64) for request in requests]
            cut = [[*windows(ids, begin, positions, positions)] for ids in texts]
            said = iter(ask([window for one in cut for window in one]))
            return [sum(next(said)[0] for _ in one) for one in cut]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise UserError(
                "a task of data.lm_eval has the model write text, which is not done during training"
            )

    return Model()


def _after(context: list[int], continuation: list[int], positions: int) -> Window:
    """Return the sample whose targets that count are the continuation, from as much of the context
    as fits."""
    ids = np.array([*context, *continuation][-(positions + 1) :], np.int64)
    return Window(ids[:-1], ids[1:], max(0, len(ids) - 1 - len(continuation)))
