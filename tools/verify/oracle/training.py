"""The training of a run by the oracle, and its record.

The tokens are read from the token file by numpy, so that inputs and targets are the file's and not
those of megaprec's samples; which samples a step takes, and which targets a loss mask leaves out,
is the run's. The loss is torch's cross-entropy, the update that of `update_rules`, clipping torch's
clip_grad_norm_.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.feed_forward.router import is_correction
from models.logical_shapes import is_never_trained, logical_shapes
from tools.config.own_rate import rate_of
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Train
from tools.verify.oracle.batch import OracleBatch
from tools.verify.oracle.model import OracleModel, Tensors
from tools.verify.oracle.plain_packing import PlainRow, packed_rows
from tools.verify.oracle.update_rules import oracle_rule
from tools.verify.parity.ranks import corpus_of
from tools.verify.parity.record import Plan, Record, RecordedSamples

TOKEN_DTYPE = np.dtype("<u2")  # of token files of small vocabularies
MakeModel = Callable[[ModelConfig, Tensors], OracleModel]
CLIPPING = "torch.nn.utils.clip_grad_norm_"


def trained(
    config: RunConfig,
    plan: Plan,
    weights: Tensors,
    make_model: MakeModel,
) -> tuple[Record, str]:
    """Return the record of the run, and what trained it, in words.

    config: on one process, on tokens of `with_random_tokens`. weights: initial, of all that is
    trained, by logical name, in the dtype in which the oracle computes.
    """
    untrained = _never_trained(config.model, weights)
    all_weights = {**weights, **untrained}
    model = make_model(config.model, all_weights)
    factors = {name: _factors(config, name, values) for name, values in all_weights.items()}
    groups = _groups(config, model, factors)
    oracles_rule = oracle_rule(config.optimizer)
    assert oracles_rule is not None, "`require_possible` refuses others"
    rule = make_rule(config.optimizer)
    optimizer = oracles_rule.make(rule, groups, config.lr.peak)
    # as its class has them: a tensor that it lacks is not compared with itself
    before = _wide(model.weights())
    tensors: dict[str, Tensors] = {"before/weight": before}
    steps: list[dict[str, Any]] = []
    samples: list[list[int]] = []
    run_sizes = sizes_of_steps(config.train, config.train.steps)
    # the schedule of rates is counted in samples or in steps
    in_samples = config.lr.unit == "samples"
    length = config.train.steps
    if in_samples:
        length = sum(size.batch for size in run_sizes)
    for number, batch in enumerate(_batches(config, plan)):
        completed = run_sizes[number].consumed if in_samples else number
        rate = rate_of(config.lr, completed, length)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        optimizer.zero_grad()
        with model.computing():
            loss, z_loss = _mean_losses(config, model, batch)
            weighted_z_loss = config.model.z_loss * z_loss
            trained_loss = loss + weighted_z_loss + model.further_loss(batch)
            trained_loss.backward()  # type: ignore[no-untyped-call]
        gradients = _wide(model.gradients())
        assert gradients.keys() == before.keys()
        tensors[f"gradient/{number}"] = gradients
        norm = _clip(config, model)
        optimizer.step()
        model.balance(config.model.router_correction_speed)
        tensors |= _states_after(number, config, model, optimizer, tensors)
        step = {"loss": loss.item(), "grad_norm": norm, "lr": rate, "outcome": "applied"}
        steps.append(step)
        samples.append(batch.ids)
    names = list(weights)
    record = Record(steps=steps, samples=samples, names=names, tensors=tensors)
    clipped_by = f"{CLIPPING} of torch {torch.__version__}"
    trained_by = f"{model.name}; {oracles_rule.name}, {clipped_by}"
    return record, trained_by


def _states_after(
    number: int,
    config: RunConfig,
    model: OracleModel,
    optimizer: torch.optim.Optimizer,
    earlier: Mapping[str, Tensors],
) -> dict[str, Tensors]:
    """Return weights, moments and the moving average after step `number`, by kind. earlier: those
    of the steps before."""
    weights = _wide(model.weights())
    states = {f"after/{number}/weight": weights}
    for kind in make_rule(config.optimizer).names:
        moments = _wide(model.moments(optimizer, kind))
        # no rule updates a correction
        trained_names = [name for name in moments if not is_correction(name)]
        states[f"after/{number}/{kind}"] = {name: moments[name] for name in trained_names}
    decay = config.optimizer.ema
    if decay:
        # the average begins with the initial weights
        before = earlier.get(f"after/{number - 1}/ema", earlier["before/weight"])
        averages: Tensors = {}
        for name, values in weights.items():
            averages[name] = decay * before[name] + (1 - decay) * values
        states[f"after/{number}/ema"] = averages
    return states


def _never_trained(model: ModelConfig, beside: Tensors) -> Tensors:
    """Return the weights that no run trains, as they begin, in the dtype of those beside them."""
    first, *_ = beside.values()
    weights: Tensors = {}
    for name, shape in logical_shapes(model).items():
        if is_never_trained(name):
            weights[name] = torch.ones(shape, dtype=first.dtype)
    return weights


def _wide(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors that a run trains, in float64."""
    wide: Tensors = {}
    for name, values in tensors.items():
        if not is_never_trained(name):
            wide[name] = values.double()
    return wide


def _factors(config: RunConfig, name: str, values: Tensor) -> tuple[float, float]:
    """Return the factors of learning rate and weight decay of a logical tensor."""
    is_matrix = values.dim() >= 2
    # of several patterns that match the first one counts
    for group in config.optimizer.groups:
        if fnmatchcase(name, group.pattern):
            lr = 1.0 if group.lr is None else group.lr
            decay = 1.0 if group.weight_decay is None else group.weight_decay
            if not is_matrix and not group.all_dims:
                decay = 0.0
            return lr, decay
    return 1.0, 1.0 if is_matrix else 0.0


def _groups(
    config: RunConfig, model: OracleModel, factors: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the groups of parameters of torch's optimizer.

    factors: of learning rate and weight decay, by logical name.
    """
    groups: list[dict[str, Any]] = []
    parameters_by_factors = model.parameters_by_factors(factors)
    for (rate, decay), parameters in parameters_by_factors.items():
        weight_decay = config.optimizer.weight_decay * decay
        group = {"params": parameters, "factor": rate, "weight_decay": weight_decay}
        groups.append(group)
    return groups


def _clip(config: RunConfig, model: OracleModel) -> float:
    """Clip the gradients, if the run does, and return their norm before it."""
    limit = config.optimizer.clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), limit, config.optimizer.norm, foreach=False
    )
    return norm.item()


def _mean_losses(
    config: RunConfig, model: OracleModel, batch: OracleBatch
) -> tuple[Tensor, Tensor]:
    """Return the loss and the z-loss, without its weight: means over all targets of the batch that
    count. The z-loss is the square of the log of the sum of the exponentials of the logits."""
    total = torch.zeros((), dtype=model.dtype)
    z_total = torch.zeros((), dtype=model.dtype)
    for rows, columns in _pieces(config, batch):
        tokens = batch.tokens[rows, columns]
        positions = batch.positions[rows, columns]
        logits = model.logits(tokens, positions)
        targets = batch.targets[rows, columns].flatten()
        rows_of_logits = logits.flatten(0, 1)
        losses = F.cross_entropy(rows_of_logits, targets, reduction="none")
        log_sums = rows_of_logits.logsumexp(-1)
        squares = log_sums.square()
        counts = batch.counts[rows, columns].flatten()
        counts = counts.to(model.dtype)
        total = total + losses @ counts
        z_total = z_total + squares @ counts
    num_counted = batch.counts.sum().to(model.dtype)
    return total / num_counted, z_total / num_counted


def _pieces(config: RunConfig, batch: OracleBatch) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns that are run at once: all samples, or one document after the other
    where a token sees its own document alone."""
    samples, length = batch.tokens.shape
    if not config.data.reset_attention_mask:
        yield slice(0, samples), slice(0, length)
        return
    for sample in range(samples):
        _, lengths = batch.documents[sample].unique_consecutive(return_counts=True)
        row = slice(sample, sample + 1)
        begin = 0
        for document_length in lengths.tolist():
            end = begin + document_length
            yield row, slice(begin, end)
            begin = end


def _batches(config: RunConfig, plan: Plan) -> Iterator[OracleBatch]:
    """Yield the batch of each step: its samples and their loss mask are those of the run; tokens,
    documents and positions are read anew from the token file."""
    corpus = corpus_of(config)
    # In a small run some targets do not count, by a mask, as in the run that is compared.
    samples = RecordedSamples(corpus.train, masked=plan.small)
    (dataset,) = corpus.datasets
    row_of = _rows(config, dataset.document_lengths())
    for size in sizes_of_steps(config.train, plan.steps):
        chosen = samples.batch(size.consumed, size.batch)
        ids = chosen.ids.tolist()
        rows = [row_of(sample) for sample in ids]
        windows = torch.stack([row.tokens for row in rows])
        documents = torch.stack([row.documents for row in rows])
        counts = torch.stack([row.counts for row in rows])
        if chosen.mask is not None:
            counts = counts * chosen.mask
        of_inputs = documents[:, :-1]
        if config.data.eod_mask_loss:
            # the first token of a document is no target, whatever the run's mask says of it
            counts = counts * (documents[:, 1:] == of_inputs)
        # with train.seq_schedule each sample is cut into sequences that follow each other
        tokens = windows[:, :-1].reshape(-1, size.length)
        targets = windows[:, 1:].reshape(-1, size.length)
        counts = counts.reshape(-1, size.length)
        own_documents = of_inputs.reshape(-1, size.length)
        if config.data.reset_position_ids:
            positions = _within_documents(own_documents)
        else:
            positions = torch.arange(size.length).expand(len(tokens), -1)
        yield OracleBatch(ids, tokens, targets, counts, own_documents, positions)


@dataclass(frozen=True)
class StepSize:
    """A step by its samples, and the tokens of its sequences. consumed: samples before it."""

    consumed: int
    batch: int
    length: int


def sizes_of_steps(train: Train, steps: int) -> list[StepSize]:
    """Return the sizes of the steps, by formulas of its own: a step has the batch and the length
    that hold at its first sample (docs/runs.md)."""
    sizes: list[StepSize] = []
    consumed = 0
    for _ in range(steps):
        batch = _held_at(consumed, train.batch_schedule, train.global_batch)
        length = _held_at(consumed, train.seq_schedule, train.seq_length)
        sizes.append(StepSize(consumed, batch, length))
        consumed += batch
    return sizes


def _held_at(consumed: int, changes: Iterable[tuple[int, int]], constant: int) -> int:
    """Return the last of the values that change at or before `consumed` samples; `constant`
    without changes."""
    held = constant
    for begin, value in changes:
        if begin <= consumed:
            held = value
    return held


def _rows(config: RunConfig, document_lengths: Any) -> Callable[[int], PlainRow]:
    """Return a function that gives the row of a sample, by its number.

    document_lengths: tokens of each document of the token file, an array of int64.
    """
    (source,) = config.data.sources
    stored = np.fromfile(Path(f"{source}.bin"), TOKEN_DTYPE)
    stream = torch.from_numpy(stored.astype(np.int64))
    length = config.train.seq_length
    if config.data.pack != "none":
        rows = packed_rows(stream, document_lengths.tolist(), length)
        return rows.__getitem__
    document_of = torch.repeat_interleave(torch.from_numpy(document_lengths))
    # random windows begin at any token
    stride = 1 if config.data.windows == "random" else length

    def window(sample: int) -> PlainRow:
        """Return the tokens of a sample, one more than its length, and their documents."""
        begin = sample * stride
        cut = slice(begin, begin + length + 1)
        return PlainRow(stream[cut], document_of[cut], torch.ones(length))

    return window


def _within_documents(documents: Tensor) -> Tensor:
    """Return the place of each token since its document, or the sample, began."""
    length = documents.shape[1]
    places = torch.arange(length).expand_as(documents)
    is_first = documents != documents.roll(1, 1)
    is_first[:, 0] = True
    # the place of the newest first token up to each token
    first_places = places * is_first
    begin_of_document = first_places.cummax(1).values
    return places - begin_of_document
