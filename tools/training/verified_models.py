"""First weights and the exported model beside transformers, before a run begins."""

from collections.abc import Iterator
from pathlib import Path

from megaprec.tokens.places import path_of
from tools.config.run_file import RunConfig
from tools.convert.auto_tokenizer import initial_tokenizer_line
from tools.convert.hf.config import config_of
from tools.convert.hf.folder import find_hf, hf_tokenizer
from tools.convert.hf.vocabulary import main_file
from tools.convert.probe import check_config, verify_initial


def verified_models(config: RunConfig, initial: str, export: str) -> Iterator[str]:
    """Yield lines on the models that transformers computes as megaprec does. Raises UserError for
    one that it computes otherwise.

    initial: the folder of first weights, "" if the run does not begin with any. export: what asks
    for an export of the model, "" if nothing does.
    """
    lines = list[str]()
    if initial:
        lines += _verify_initial(config, path_of(initial))
    if export:
        exported = config_of(config.sized_model, "float32")
        lines.append(check_config(exported, export))
    yield from filter(None, lines)


def _verify_initial(config: RunConfig, folder: Path) -> Iterator[str]:
    """Yield lines on first weights beside transformers: their model, and their tokenizer."""
    yield verify_initial(folder)
    # A tokenizer from another place is compared elsewhere (`check_tokens`).
    own_file = main_file(hf_tokenizer(folder)) if find_hf(folder) else None
    if own_file and config.data.tokenizer and Path(config.data.tokenizer) == own_file:
        yield initial_tokenizer_line(folder, own_file)
