"""Settings under which the bits of a run would depend on its layout although `train.numerics =
"canonical"`.

The rules about sums over data-parallel ranks are the optimizer's; the others are about what each
rank computes.
"""

from collections.abc import Iterator

import torch

from megaprec.errors import UserError
from megaprec.optim.canonical.requirements import canonical_conflicts
from models.config import ModelConfig
from tools.config.data_settings import Data
from tools.config.native_keys import plan_of
from tools.config.precision_settings import FP8, Precision
from tools.config.settings import Parallel, Train

CANONICAL = 'train.numerics = "canonical"'


def virtual_ranks(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless the processes of the tensor-parallel axis share the virtual ranks
    evenly."""
    if train.numerics == "canonical" and train.canonical_shards % parallel.tensor:
        yield (
            f"parallel.tensor {parallel.tensor} does not divide train.canonical_shards "
            f"{train.canonical_shards}: set train.canonical_shards to a multiple of "
            "parallel.tensor in all layouts that are to be equal"
        )


def virtual_sizes(train: Train, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each size that the virtual ranks cannot share evenly."""
    shards = train.canonical_shards
    if train.numerics != "canonical":
        return
    # a gated feed-forward and experts may have several widths
    widths = {f"model.{key}": width for key, width in model.ffn_widths.items()}
    cuts = {"train.seq_length": train.seq_length, "model.heads": model.heads, **widths}
    if uneven := [f"{key} {size}" for key, size in cuts.items() if size % shards]:
        yield (
            f"train.canonical_shards {shards} does not divide {', '.join(uneven)}, which it cuts: "
            "change one of them"
        )
    if model.kv_heads % shards and shards % model.kv_heads:
        yield (
            f"train.canonical_shards {shards} and model.kv_heads {model.kv_heads}: one must divide "
            "the other, because each shard has key and value heads of its own or shares one"
        )


def unequal_settings(
    train: Train, model: ModelConfig, precision: Precision, fp8: FP8, data: Data
) -> Iterator[str]:
    """Yield a problem for each setting whose results depend on the layout, or that does not know
    virtual ranks."""
    if train.numerics != "canonical":
        return
    # threads of a product cut its sum
    if not train.threads:
        yield (
            f"{CANONICAL} needs train.threads: with train.threads = 0 the number of threads "
            "depends on the number of ranks, and sums inside a product depend on the number of "
            "threads; set train.threads = 1, for example"
        )
    if model.factory:
        yield (
            f'{CANONICAL} knows the built-in families only, not model.factory "{model.factory}": '
            "remove one of them"
        )
    if model.mtp_layers:
        yield (
            f"{CANONICAL} and model.mtp_layers = {model.mtp_layers}: virtual ranks do not compute "
            "these modules; set 0"
        )
    if train.sentinel:
        yield (
            f"{CANONICAL} and train.sentinel = {train.sentinel}: the sentinel does not know "
            "virtual ranks; set 0"
        )
    if train.compile != "off":
        yield (
            f'{CANONICAL} and train.compile = "{train.compile}": its rounding is up to the '
            'compiler; set "off"'
        )
    if data.lm_eval:
        yield (
            f"{CANONICAL} and data.lm_eval: tasks are not computed by virtual ranks; evaluate "
            "exported checkpoints instead"
        )
    yield from _narrow_pipeline(precision, fp8)
    if fp8.kind != "none":
        yield from _layout_of_scales(fp8)


def unequal_sums(train: Train, parallel: Parallel, precision: Precision, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting under which the sums over data ranks would depend on their
    number."""
    if train.numerics != "canonical":
        return
    try:
        plan = plan_of(precision, fp8)
    except UserError:
        return  # another rule reports it
    yield from (
        f"{CANONICAL}, parallel.data = {parallel.data}: {line}"
        for line in canonical_conflicts(plan, parallel.data)
    )


def _narrow_pipeline(precision: Precision, fp8: FP8) -> Iterator[str]:
    try:
        plan = plan_of(precision, fp8)
    except UserError:
        return  # another rule reports it
    # unless the dtype between stages holds every number of the residual stream
    if torch.promote_types(plan.pipeline, plan.residual) != plan.pipeline:
        yield (
            f'{CANONICAL} and precision.pipeline = "{precision.pipeline}": stages would round what '
            "they send each other, so "
            "results would depend on parallel.pipeline; leave precision.pipeline out"
        )


def _layout_of_scales(fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting under which FP8 scales would depend on the layout."""
    if fp8.history == "te":
        yield (
            f'{CANONICAL} and fp8.history = "te": scales depend on the order of micro-batches; set '
            'fp8.history = "step"'
        )
    if not fp8.reduce_amax:
        yield (
            f"{CANONICAL} and fp8.reduce_amax = false: scales depend on parallel.data; set "
            "fp8.reduce_amax = true"
        )
    if fp8.backend != "torch":
        yield (
            f'{CANONICAL} and fp8.backend = "{fp8.backend}": its sums are not known to be fixed; '
            'set fp8.backend = "torch"'
        )
    if fp8.shadow_every:
        yield (
            f"{CANONICAL} and fp8.shadow_every = {fp8.shadow_every}: the comparison does not know "
            "virtual ranks; set 0"
        )
