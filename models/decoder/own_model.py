"""Models that users build from the parallel layers: `model.factory = "my_model.py:build"`.

The function is called once for each pipeline stage that a rank holds, as `build(config, context,
cut, tied)`, and returns a module with the interface of `models.decoder.stages.Stage`.
docs/parity.md describes this interface, with an example.
"""

from typing import Any

from torch import nn

from megaprec.comm.layout import has_layout
from megaprec.errors import UserError
from megaprec.user_functions import find_function
from models.config import ModelConfig
from models.decoder.cutting import MakeStage
from models.decoder.stages import Cut, Stage
from parallel.context import Context


def stage_maker(factory: str) -> MakeStage:
    """Return the function that builds a stage: the one that `factory` names, or Stage if `factory`
    is empty.

    Stages that the user's function returns are validated. Runs the user's code. Raises UserError if
    the function cannot be found.
    """
    if not factory:
        return Stage
    make = find_function("model.factory", factory)

    def make_valid_stage(
        config: ModelConfig,
        context: Context,
        cut: Cut,
        tied: tuple[int, ...],
    ) -> Stage:
        """Return the stage that the user's function builds, once it is checked."""
        stage = make(config, context, cut, tied)
        _require_stage(factory, stage, cut)
        return stage

    return make_valid_stage


def _require_stage(
    factory: str,
    stage: Any,
    cut: Cut,
) -> None:
    """Raise UserError unless `stage`, which the function that `factory` names has built, is a torch
    module, has `losses` if it is the last one, and parameters with layouts.

    Otherwise the first pass would fail, and nothing would name the user's function.
    """
    subject = f'model.factory = "{factory}": stage {cut.stage}'
    if not isinstance(stage, nn.Module):
        raise UserError.of("model.stage_not_module", subject=subject, kind=type(stage).__name__)
    if cut.last and not callable(getattr(stage, "losses", None)):
        raise UserError.of("model.last_stage_without_losses", subject=subject)
    # The optimizer shards, names and saves parameters by their layouts.
    without_layout = [
        name for name, parameter in stage.named_parameters() if not has_layout(parameter)
    ]
    if without_layout:
        others = len(without_layout) - 1
        nor_others = f", nor have {others} more" if others else ""
        raise UserError.of(
            "model.stage_parameter_layout",
            subject=subject,
            without_layout=without_layout[0],
            nor_others=nor_others,
        )
