"""The models whose products are emulated in NVFP4."""

from collections.abc import Iterator

from megaprec.errors import Problem, UserError
from models.config import ModelConfig

# Keys of models that have layers whose rows are not those of one micro-batch in order, or that are
# computed again without it.
_OTHER_LAYERS = ("experts", "latent", "delta_net", "mtp_layers", "factory")


def nvfp4_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for each kind of layer of the model that NVFP4's rounding does not know."""
    for key in _OTHER_LAYERS:
        if getattr(config, key):
            yield Problem.of("model.nvfp4_layers", key=key)


def require_nvfp4_layers(config: ModelConfig) -> None:
    """Raise UserError with all problems of `nvfp4_problems`."""
    problems = [*nvfp4_problems(config)]
    if problems:
        raise UserError(*problems)
