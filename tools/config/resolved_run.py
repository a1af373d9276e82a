"""A run file as a run, whose model may be that of first weights or of the run that it branches
from, and whose FP8 format may be that of its checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path

from megaprec.errors import UserError
from tools.config.run_file import RunConfig, RunFile
from tools.parts import optional_parts


def resolve_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of the TOML file `path`, changed by `overrides`. Raises UserError with all
    problems.

    Keys of [model] that both leave out are those of the weights of train.init_from; but if the
    folder does not say its model (`leaves_model_open`), a run file that does is enough. If both
    leave out all of [model], it is that of the run of train.branch_from.
    """
    run_file = RunFile(path, overrides)
    weights = run_file.first_weights
    origin = run_file.origin_of_model
    initial = None
    try:
        if weights and not (run_file.has_own_model and optional_parts.leaves_model_open(weights)):
            initial = optional_parts.initial_model(weights)
            if run_file.grows:
                initial = optional_parts.with_more_tokens(initial, run_file.grown_tokenizer)
        elif origin:
            initial = optional_parts.model_of_branch(origin, run_file.checkpoint_folder)
    except UserError as error:
        # raised with the other problems of the run file
        return run_file.resolve(error)
    config = run_file.resolve(initial)
    if config.fp8.kind != "none" and not config.given("fp8.format"):
        return optional_parts.with_kept_format(config)
    return config
