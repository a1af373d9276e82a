"""What `megaprec train` keeps in a checkpoint besides tensors: how far the run was, its model and its tokenizer."""

from dataclasses import dataclass
from typing import Any

from megaprec.checkpoint.store import Store
from megaprec.errors import UserError


@dataclass(frozen=True)
class Progress:
    """How far a run has come. A skipped step consumes its samples, but the learning rate waits for it.

    Samples and tokens are counted, for a resumed run may have another batch or sequence length.
    """

    step: int = 0
    applied: int = 0
    samples: int = 0
    applied_samples: int = 0
    tokens: int = 0

    @property
    def skipped(self) -> int:
        return self.step - self.applied


def kept(store: Store, key: str) -> Any:
    """What is kept as `key`. Raises UserError for a checkpoint that was saved by another program."""
    if key not in store.index:
        raise UserError(f'{store.path} was not saved by this `megaprec train`: its checkpoint.json has no "{key}"')
    return store.index[key]
