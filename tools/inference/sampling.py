"""The choice of the next token: the likeliest, or one drawn from the likelier ones.

Tokens are ordered by their logits, and each limit keeps the first of them: top_k a number, top_p
those that together have a probability, min_p those with a fraction of the likeliest's probability.
The probabilities are those at the temperature, among the tokens that the limits before have kept.
Order and meaning are those of transformers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError

# Keys of generation_config.json that do not change which tokens are chosen, or that the model's
# ends are read from.
_NO_CHOICE = (
    "_from_model_config transformers_version bos_token_id eos_token_id pad_token_id "
    "decoder_start_token_id do_sample "
    "max_length max_new_tokens max_time use_cache cache_implementation cache_config "
    "return_legacy_cache "
    "return_dict_in_generate num_return_sequences output_attentions output_hidden_states "
    "output_scores output_logits "
    "prefill_chunk_size compile_config disable_compile early_stopping renormalize_logits "
    "remove_invalid_values "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens "
    "max_matching_ngram_size "
    "speculation_type token_healing low_memory trust_remote_code"
)
NO_CHOICE = frozenset(_NO_CHOICE.split())
# values that change nothing, beside null and what is empty
NEUTRAL = {"temperature": (1,), "top_k": (0,)}
ZERO_OR_ONE = (0, 1)  # those of other keys


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice.

    temperature: divides the logits; 0: the likeliest token, whatever the limits.
    top_k: number of tokens; 0: all.
    top_p: least probability of the kept tokens together; 1: all.
    min_p: least probability of a token, as a fraction of the likeliest's; 0: all.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a line for each setting that is wrong, named as the option of the command."""
        if not 0 <= self.temperature < math.inf:
            yield (
                f"--temperature {self.temperature:g}: give 0 (always the most likely token) or more"
            )
        if self.top_k < 0:
            yield f"--top-k {self.top_k}: give at least 1, or 0 for no such limit"
        if not 0 < self.top_p <= 1:
            yield f"--top-p {self.top_p:g}: give a number above 0 and at most 1, which is no limit"
        if not 0 <= self.min_p <= 1:
            yield f"--min-p {self.min_p:g}: give a number from 0, which is no limit, to 1"

    def not_followed(self, generation: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a generation_config.json says of the choice of tokens that these settings do
        not do."""
        settings = asdict(self)
        not_followed = {}
        for key, value in generation.items():
            is_neutral = value in (None, [], {}, *NEUTRAL.get(key, ZERO_OR_ONE))
            if key not in NO_CHOICE and not is_neutral and value != settings.get(key):
                not_followed[key] = value
        return not_followed

    def choose(
        self, logits: Tensor, generator: torch.Generator, barred: Tensor | None = None
    ) -> int:
        """Return the id of the next token. Raises UserError if the logits are not finite.

        logits: [vocab].
        barred: True for ids that are never chosen; None bars none.
        """
        if not logits.isfinite().all():
            raise UserError.of("text.not_finite")
        if barred is not None:
            logits = logits.masked_fill(barred, -math.inf)
        # A smaller temperature is 0 in the arithmetic of the logits.
        if self.temperature < torch.finfo(logits.dtype).tiny:
            return int(logits.argmax())
        ids, probabilities = self.candidates(logits)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the tokens that may be chosen, likeliest first, and their
        probabilities."""
        count = min(self.top_k or len(logits), len(logits))
        best, ids = logits.topk(count)
        # The difference comes first: divided by a small temperature, logits would overflow.
        probabilities = ((best - best[0]) / self.temperature).softmax(-1)
        if self.top_p < 1:
            # The token with which the sum reaches top_p is one of them, as in transformers.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = _first(probabilities, before < self.top_p)
        if self.min_p > 0:
            probabilities = _first(probabilities, probabilities >= self.min_p * probabilities[0])
        return ids[: len(probabilities)], probabilities


def _first(probabilities: Tensor, retained: Tensor) -> Tensor:
    """Return the probabilities of the retained ones, which are the first and at least one, as a
    share of their sum."""
    first = probabilities[: max(1, int(retained.sum()))]
    return first / first.sum()
