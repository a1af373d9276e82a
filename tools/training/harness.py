"""Tasks of lm-evaluation-harness during training (data.lm_eval), computed by all ranks.

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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.diagnose.position import Position
from megaprec.errors import Problem, UserError
from megaprec.text.tokenizer import Tokenizer
from models.engine.engine import Engine
from models.engine.relay import Relay
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import Data
from tools.inference.likelihood import Likelihood, likelihoods
from tools.inference.windows import Ids, Window, windows
from tools.journal.records import TASK_PREFIX
from tools.training.corpus import Corpus

FEWSHOT_SEED = 1234  # the harness's own
PHASE = "tasks of lm-evaluation-harness"  # this rank's position while it computes them
Ask = Callable[[Sequence[Window]], list[Likelihood]]


def require_harness(config: RunConfig) -> None:
    """Raise UserError if a task of data.lm_eval cannot be evaluated during training: if the harness
    is not installed, the task is not there, or it needs other answers than probabilities.

    Loads the tasks, and their data if the harness has to download them.
    """
    data = config.data
    if not data.lm_eval:
        return
    if find_spec("lm_eval") is None:
        raise UserError.of("training.harness_missing")
    if data.lm_eval_folder and not Path(data.lm_eval_folder).is_dir():
        raise UserError.of("training.harness_folder", folder=data.lm_eval_folder)
    manager = _manager(data)
    _require_known_tasks(manager, data)
    for name in data.lm_eval:
        _require_loadable(manager, name)


def _require_known_tasks(manager: Any, data: Data) -> None:
    """Raise UserError, with a problem for each task of data.lm_eval that the harness does not
    have."""
    known_tasks = set(manager.all_tasks)
    missing = [name for name in data.lm_eval if name not in known_tasks]
    if not missing:
        return
    if data.lm_eval_folder:
        searched = f" nor in {data.lm_eval_folder}"
    else:
        searched = "; data.lm_eval_folder names those of own"
    raise UserError(
        *(Problem.of("training.harness_no_task", name=name, searched=searched) for name in missing)
    )


def _require_loadable(manager: Any, name: str) -> None:
    """Raise UserError if a task cannot be loaded, or has the model write text."""
    try:
        tasks = _load_tasks(manager, [name])["tasks"]
    except Exception as error:
        raise UserError.of("training.harness_task", name=name, reason=_in_a_line(error)) from error
    for task_name, task in tasks.items():  # several, if the name is that of a group
        if task.OUTPUT_TYPE == "generate_until":
            reason = "has the model write text, which is not done during training"
            raise UserError.of(
                "training.harness_unsupported", name=name, task_name=task_name, reason=reason
            )


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class Harness:
    """The tasks of a run. `results` is collective over its ranks."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, engine: Engine, position: Position
    ) -> None:
        self._data = config.data
        self._engine = engine
        self._position = position
        self._relay = Relay(
            engine.stages,
            engine.schedule.rank_of_stage,
            engine.pp,
            engine.dp,
            engine.optimizer.world,
            engine.device,
        )
        if corpus.tokenizer is None:
            raise UserError.of("training.harness_tokenizer")
        if corpus.documents.begin is None:
            raise UserError.of("training.harness_begin_token")
        self._tokenizer = corpus.tokenizer
        self._begin_token = corpus.documents.begin
        self._max_positions = config.sized_model.max_positions

    @cached_property
    def _tasks(self) -> Any:
        return _load_tasks(_manager(self._data), self._data.lm_eval)

    @cached_property
    def _model(self) -> Any:
        return _language_model(self._ask, self._tokenizer, self._begin_token, self._max_positions)

    def results(self) -> dict[str, float]:
        """Return the fields of metrics.jsonl, on rank 0: lm_eval/TASK/METRIC; none, with a warning,
        if the harness fails.
        """
        self._engine.optimizer.wait()  # gathers of updated weights may still be under way
        if self._relay.world.rank:
            # The other ranks compute what rank 0 sends, until it sends nothing.
            while samples := _broadcast_samples(self._relay, []):
                self._answer(samples)
            return {}
        try:
            with _quiet_harness():
                return _fields(self._evaluate())
        except Exception as error:
            print(
                f"warning    no results of data.lm_eval: {_in_a_line(error)}; training goes on",
                file=sys.stderr,
                flush=True,
            )
            return {}
        finally:
            _broadcast_samples(self._relay, [])

    def _evaluate(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the harness's metrics by task."""
        self._position.note_action(PHASE)
        evaluator: Any = import_module("lm_eval.evaluator")
        evaluation = evaluator.evaluate(
            self._model,
            self._tasks,
            limit=self._data.lm_eval_limit or None,
            bootstrap_iters=0,  # no standard errors, which take long
            log_samples=False,
        )
        return evaluation["results"]

    def _ask(self, samples: Sequence[Window]) -> list[Likelihood]:
        """Return the likelihoods of samples, which all ranks compute. For rank 0."""
        if not samples:
            return []
        return self._answer(_broadcast_samples(self._relay, samples))

    def _answer(self, samples: Sequence[Window]) -> list[Likelihood]:
        return likelihoods(self._relay, samples, lambda _: self._position.note_action(PHASE))


def _broadcast_samples(relay: Relay, samples: Sequence[Window]) -> list[Window]:
    """Return rank 0's samples on all ranks; none: there are no more. Collective over the world.

    Two messages. The first has two numbers: how many sizes and how many token ids follow. The
    second has the sizes, two for each sample (its length, and the first target that counts), and
    then the tokens and targets of each sample.
    """
    world = relay.world
    if world.group is None:
        return [*samples]
    sizes = list[int]()
    token_ids = list[Ids]()
    for sample in samples:
        sizes += [len(sample.tokens), sample.first]
        token_ids += [sample.tokens, sample.targets]
    num_ids = sum(map(len, token_ids))
    lengths = torch.tensor([len(sizes), num_ids], device=relay.device)
    dist.broadcast(lengths, 0, group=world.group)
    num_sizes, num_ids = lengths.tolist()
    if not num_sizes:
        return []

    if samples:
        flat = np.concatenate([np.array(sizes, np.int64), *token_ids])
    else:  # to receive into
        flat = np.zeros(num_sizes + num_ids, np.int64)
    message: Tensor = torch.from_numpy(flat).to(relay.device)
    dist.broadcast(message, 0, group=world.group)
    return _unpack_samples(message.cpu().numpy(), num_sizes)


def _unpack_samples(message: Ids, num_sizes: int) -> list[Window]:
    """Return the samples of the second message of `_broadcast_samples`, of which the first
    `num_sizes` numbers are the sizes."""
    samples = list[Window]()
    start = num_sizes
    for length, first in message[:num_sizes].reshape(-1, 2).tolist():
        end = start + 2 * length
        tokens, targets = message[start:end].reshape(2, length)
        samples.append(Window(tokens, targets, first))
        start = end
    return samples


def _fields(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of each task by the name of their field, which the filter's name "none" is
    left out of.
    """
    fields = dict[str, float]()
    for task, metrics in results.items():
        for metric_and_filter, value in metrics.items():
            metric, _, filter_name = metric_and_filter.partition(",")
            # Texts beside the metrics, such as the task's alias.
            if not isinstance(value, int | float):
                continue
            if metric.endswith("_stderr") or metric == "sample_len":  # no results
                continue
            suffix = "" if filter_name in ("", "none") else f"/{filter_name}"
            fields[f"{TASK_PREFIX}{task}/{metric}{suffix}"] = float(value)
    return fields


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Keep the harness's bars and warnings off the log: `require_harness` has shown the warnings
    before the run.
    """
    task_module: Any = import_module("lm_eval.api.task")
    logger = logging.getLogger("lm_eval")
    progress_bar = task_module.tqdm
    level = logger.level
    task_module.tqdm = partial(progress_bar, disable=True)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        task_module.tqdm = progress_bar
        logger.setLevel(level)


def _manager(data: Data) -> Any:
    return import_module("lm_eval.tasks").TaskManager(include_path=data.lm_eval_folder or None)


def _load_tasks(manager: Any, names: Sequence[str]) -> Any:
    """Return tasks as the harness's evaluation takes them, with the same examples before a question
    at every step.
    """
    loaded = manager.load([*names])
    for task in loaded["tasks"].values():
        # As the harness's own command does: a task that names no number has no examples.
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def _language_model(ask: Ask, tokenizer: Tokenizer, begin_token: int, max_positions: int) -> Any:
    """Return the harness's view of the model: its tokens, and the probabilities that `ask` returns.

    begin_token: id of the token before a document, as in training. Long documents are cut as the
        harness cuts them.
    """

    # Defined here, because its base class is there only if the harness is installed.
    class Model(import_module("lm_eval.api.model").TemplateLM):
        eot_token_id = begin_token

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return tokenizer.encode(string)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Likelihood]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[Likelihood]:
            samples = [
                _continuation_sample(context, continuation, max_positions)
                for _, context, continuation in requests
            ]
            return ask(samples)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            samples = list[Window]()
            # The samples of all texts go at once, in batches that may span texts.
            counts = list[int]()  # of samples of each text
            for request in requests:
                token_ids = np.array(tokenizer.encode(request.args[0]), np.int64)
                samples_of_text = [*windows(token_ids, begin_token, max_positions, max_positions)]
                samples += samples_of_text
                counts.append(len(samples_of_text))
            log_probabilities = (log_probability for log_probability, _ in ask(samples))
            return [sum(islice(log_probabilities, count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise UserError.of("training.harness_generates")

    return Model()


def _continuation_sample(context: list[int], continuation: list[int], max_positions: int) -> Window:
    """Return the sample whose targets that count are the continuation, with as much of the context
    as fits.
    """
    tokens = [*context, *continuation]
    token_ids = np.array(tokens[-(max_positions + 1) :], np.int64)  # the last one is a target only
    targets = token_ids[1:]
    first = max(0, len(targets) - len(continuation))
    return Window(token_ids[:-1], targets, first)
