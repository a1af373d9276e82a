"""The moving average of a checkpoint's weights as a model to be read, evaluated or written.

What the checkpoint keeps no average of is taken as it is: frozen weights, which are their own
average, and the corrections of routers by loads, which are no weights to be averaged. `merge` has
the same rule.
"""

from dataclasses import replace

from megaprec.errors import UserError
from megaprec.optim.state.flat_buffer import EMA
from models.feed_forward.router import is_correction
from tools.console.units import counted
from tools.convert.core.source import Facts, Origin, Source


def averaged(source: Source) -> Source:
    """Return the model whose weights are the averages that `source` keeps, without optimizer state.

    Raises UserError if it keeps none.
    """
    if not any(source.keys(EMA)):
        raise UserError.of("convert.no_ema", path=source.path)
    origins = [_origin(source, key) for key in source.keys("weight")]
    facts = _facts(source)
    return Source(source.path, source.kind, source.model, origins, facts, source.tokenizer)


def _origin(source: Source, weight_key: str) -> Origin:
    """Return the origin of a weight of the averaged model."""
    name = weight_key.partition("/")[2]
    average_key = f"{EMA}/{name}"
    if average_key not in source.shapes:
        return source.origin(weight_key)
    # a checkpoint of megaprec, which alone has averages, has one logical tensor in each origin
    return replace(source.origin(average_key), keys=(weight_key,))


def _facts(source: Source) -> Facts:
    """Return what is known of the averaged model besides its tensors."""
    left_out = [kind for kind in source.kinds if kind != EMA]
    if source.facts.unread:
        left_out.append(source.facts.unread)
    notes = [f"the weights are the moving average that {source.path} keeps (ema)"]
    corrections = [key for key in source.keys("weight") if is_correction(key)]
    if corrections:
        notes.append(
            f"{counted(len(corrections), 'correction')} of routers by loads, such as "
            f"{corrections[0]}: as in the checkpoint, for they are no weights to be averaged"
        )
    return replace(
        source.facts,
        scaler={},
        rule={},
        watch={},
        unread=", ".join(left_out),
        averaged=True,
        notes=(*source.facts.notes, *notes),
    )
