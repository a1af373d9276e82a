"""The FP8 format of a run that goes on: that of its checkpoint, unless a key says another.

The format that `fp8.format = "auto"` stands for follows the kind of scales, and has not always: a
run that began with another default keeps the numbers that it has been trained with.
"""

from megaprec.errors import UserError
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.training.branch import open_start
from tools.training.changed_keys import saved_keys

KIND_KEY = "fp8.kind"
FORMAT_KEY = "fp8.format"
FORMATS = ("hybrid", "e4m3")


def with_kept_format(config: RunConfig) -> RunConfig:
    """Return the run with the FP8 format that its checkpoint names for the same kind of scales; as
    it is where there is no such checkpoint."""
    try:
        checkpoint = open_start(config)
        saved = saved_keys(checkpoint) if checkpoint else {}
    except UserError:  # the checks of the run tell it with all other problems
        return config
    if checkpoint is None or saved.get(KIND_KEY) != toml(config.fp8.kind):
        return config
    for kept_format in FORMATS:
        if saved.get(FORMAT_KEY) == toml(kept_format):
            return config.with_value(FORMAT_KEY, kept_format, f"checkpoint {checkpoint.path}")
    return config


def kept_format_note(config: RunConfig) -> str:
    """Return a note on a kept format that is not the usual one of its kind; "" if there is none."""
    recipe = config.plan.fp8
    origin = config.origin(FORMAT_KEY)
    if recipe is None or not origin.startswith("checkpoint "):
        return ""
    usual = recipe.scales.usual_format
    if recipe.format == usual:
        return ""
    return (
        f"{FORMAT_KEY} = {toml(recipe.format)} is that of the {origin}, and the run keeps it; "
        f"{FORMAT_KEY}={usual} is what new runs with {KIND_KEY} = {toml(recipe.kind)} have"
    )
