"""Settings of a run file under which sequences cannot be cut over ranks (`parallel.context`).

The rules about the model and its precision are those of the engine
(`models.attention.context_limits`).
"""

from collections.abc import Iterator
from contextlib import suppress

from megaprec.errors import UserError
from models.attention.context_limits import context_problems
from models.config import ModelConfig
from tools.config.data_settings import Data
from tools.config.native_keys import plan_of
from tools.config.precision_settings import FP8, Precision
from tools.config.settings import Parallel, Train


def cut_sequences(
    model: ModelConfig, train: Train, parallel: Parallel, precision: Precision, fp8: FP8, data: Data
) -> Iterator[str]:
    """Yield a problem for each setting under which a sequence cannot be cut over parallel.context
    ranks."""
    if parallel.context == 1:
        return
    setting = f"parallel.context = {parallel.context}"
    slices = parallel.tensor if parallel.sequence else 1
    with suppress(UserError):  # another rule reports a plan that cannot be
        plan = plan_of(precision, fp8)
        canonical = train.numerics == "canonical"
        yield from context_problems(
            model, plan, parallel.context, train.seq_length, slices, canonical
        )
    if train.sentinel:
        yield (
            f"{setting} and train.sentinel = {train.sentinel}: the sentinel does not know cut "
            "sequences; set 0"
        )
    if data.lm_eval:
        yield (
            f"{setting} and data.lm_eval: tasks have texts of any length; evaluate exported "
            "checkpoints instead"
        )
