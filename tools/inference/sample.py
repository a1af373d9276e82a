"""The sample that a run prints at its end (log.sample)."""

from pathlib import Path

from megaprec.errors import UserError
from models.decoder.kv_cache import CachedStage
from tools.inference.generation import Generation, escape_control_characters
from tools.inference.load import load_model
from tools.inference.sampling import Sampling

SAMPLE_TOKENS = 60


def sample_text(folder: Path, prompt: str) -> str:
    """Return a text that begins with the prompt, or the reason why it cannot be continued."""
    try:
        model = load_model(folder, CachedStage)
        text = "".join(Generation(model, prompt, SAMPLE_TOKENS, Sampling()))
    except UserError as error:
        return f"none: {error}"
    return f"{prompt}{escape_control_characters(text)}"
