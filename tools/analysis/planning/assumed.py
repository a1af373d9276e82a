"""The words on what a prediction rests on."""

from collections.abc import Iterator
from math import isinf

from models.estimate.storage import without_storage
from tools.analysis.planning.reached import LAUNCH
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.products import has_misaligned_head
from tools.config.run_file import RunConfig
from tools.console.units import duration, flops


def assumed_lines(config: RunConfig, assumed: Assumptions) -> Iterator[str]:
    """Yield the lines on the speeds that a prediction rests on, and on those of its rules that rest
    on runs of one model alone."""
    peak = flops(assumed.tflops * 1e12)
    yield f"assumed    products at {assumed.efficiency:.0%} of {peak}/s a rank,"
    yield (
        f"           links of {assumed.fast:g} GB/s within {assumed.machine} ranks and "
        f"{assumed.slow:g} GB/s beyond,"
    )
    if not isinf(assumed.bandwidth):
        # a slow one, as of a calibrated machine, with its digits behind the point
        digits = ",.0f" if assumed.bandwidth >= 100 else ".3g"
        yield f"           memory at {assumed.bandwidth:{digits}} GB/s between products;"
        yield (
            f"           {assumed.hidden:.0%} of traffic in the passes runs beside products, and "
            f"{1 - assumed.exposed:.0%}"
        )
        yield "           of that of replicas;"
    for rule in _rules(config, assumed):
        yield f"           {rule};"
    if assumed.factor != 1.0:
        yield f"           all times {assumed.factor:.2f} as long, as --measured was;"
    yield "           other: --efficiency, --tflops, --fast-link, --machine, --slow-link"


def _rules(config: RunConfig, assumed: Assumptions) -> Iterator[str]:
    """Yield the rules that this run's prediction follows and that few runs confirm."""
    is_compiled = config.compile_mode(assumed.device) == "block"
    if not is_compiled and assumed.launch == LAUNCH:
        yield (
            f"a layer that is not compiled takes {duration(LAUNCH)} forward at least: seen of one "
            "model"
        )
    if assumed.misaligned > 1 and has_misaligned_head(config):
        yield (
            f"a head of {config.sized_model.vocab:,} words takes {assumed.misaligned:g} times as "
            "long, not aligned: seen of one model"
        )
    if config.optimizer.offload == "host" and not isinf(assumed.host):
        yield (
            f"masters and moments come from host memory at {assumed.host:g} GB/s, and go back at "
            "the same time: not measured"
        )
    if config.parallel.async_tensor:
        yield "parallel.async_tensor is not timed, and its workspace is not counted"
    if assumed.device == "cuda" and not isinf(assumed.bandwidth):
        with without_storage(assumed.device):
            parts = config.recurrent_kernels(config.sized_model)
        if parts:
            yield "recurrent layers are timed as by kernels: plain torch is slower"
