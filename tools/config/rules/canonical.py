"""Settings under which the bits of a run would depend on its layout although `train.numerics =
"canonical"`.

The rules about sums over data-parallel ranks are the optimizer's; the others are about what each
rank computes.
"""

from collections.abc import Iterator

import torch

from megaprec.errors import Problem
from megaprec.optim.canonical.requirements import canonical_conflicts
from megaprec.precision.plan import DTYPES
from models.config import ModelConfig
from tools.config.tables.data_settings import Data
from tools.config.tables.native_keys import plan_or_none, recipe_or_none
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.settings import Parallel, Train

CANONICAL = 'train.numerics = "canonical"'


def virtual_ranks(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless the processes of the tensor-parallel axis share the virtual ranks
    evenly."""
    if train.numerics == "canonical" and train.canonical_shards % parallel.tensor:
        yield Problem.of(
            "config.canonical_tensor",
            tensor=parallel.tensor,
            canonical_shards=train.canonical_shards,
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
        yield Problem.of("config.canonical_sizes", shards=shards, sizes=", ".join(uneven))
    if not model.delta_net.divides(shards):
        sizes = model.delta_net
        yield Problem.of(
            "config.canonical_delta_net",
            shards=shards,
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
        )
    if not model.mamba.divides(shards):
        yield Problem.of("config.canonical_mamba", shards=shards, groups=model.mamba.groups)
    for kv_heads in dict.fromkeys((model.kv_heads, model.global_kv_heads or model.kv_heads)):
        if kv_heads % shards and shards % kv_heads:
            yield Problem.of("config.canonical_kv_heads", shards=shards, kv_heads=kv_heads)


def unequal_steps(train: Train) -> Iterator[str]:
    """Yield a problem for each setting of [train] whose results depend on the layout, or that does
    not know virtual ranks."""
    if train.numerics != "canonical":
        return
    # threads of a product cut its sum
    if not train.threads:
        yield Problem.of("config.canonical_threads")
    if train.sentinel:
        yield Problem.of("config.canonical_sentinel", sentinel=train.sentinel)
    if train.compile not in ("auto", "off"):
        yield Problem.of("config.canonical_compile", compile=train.compile)


def unequal_models(train: Train, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each part of a model that does not know virtual ranks."""
    if train.numerics != "canonical":
        return
    if model.factory:
        yield Problem.of("config.canonical_factory", factory=model.factory)
    if model.mtp_layers:
        yield Problem.of("config.canonical_mtp", mtp_layers=model.mtp_layers)


def unequal_tasks(train: Train, data: Data) -> Iterator[str]:
    """Yield a problem for tasks that do not know virtual ranks."""
    if train.numerics == "canonical" and data.lm_eval:
        yield Problem.of("config.canonical_lm_eval")


def unequal_stages(train: Train, precision: Precision) -> Iterator[str]:
    """Yield a problem unless the dtype between stages holds every number of the residual stream."""
    if train.numerics != "canonical":
        return
    pipeline = DTYPES[precision.pipeline]
    if torch.promote_types(pipeline, DTYPES[precision.residual]) != pipeline:
        yield Problem.of("config.canonical_pipeline", pipeline=precision.pipeline)


def unequal_scales(train: Train, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting under which FP8 scales would depend on the layout."""
    recipe = recipe_or_none(fp8)
    if train.numerics != "canonical" or recipe is None:
        return
    # micro-batches advance the scales in the order in which the layout computes them
    if not recipe.repeatable:
        yield Problem.of("config.canonical_history")
    if not recipe.reduce_amax:
        yield Problem.of("config.canonical_amaxes")
    if recipe.backend != "torch":
        yield Problem.of("config.canonical_fp8_backend", backend=recipe.backend)
    if recipe.scales.four_bits:
        yield Problem.of("config.canonical_nvfp4")
    if fp8.shadow_every:
        yield Problem.of("config.canonical_shadow", shadow_every=fp8.shadow_every)


def unequal_sums(train: Train, parallel: Parallel, precision: Precision, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting under which the sums over data ranks would depend on their
    number."""
    plan = plan_or_none(precision, fp8)
    if plan is None or train.numerics != "canonical":
        return
    for problem in canonical_conflicts(plan, parallel.data):
        yield f"{CANONICAL}, parallel.data = {parallel.data}: {problem}"
