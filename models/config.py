"""What a model is: its family, its sizes and the switches by which the families differ.

`ModelConfig` is resolved the moment it exists: what is not given follows from the family or from the sizes
given before it, and no field means "decide later". The one exception is `vocab`, which only a tokenizer
knows: 0 until `with_vocab`. Counts of parameters and FLOPs are exact functions of the fields, so a run can
be planned without building anything.

Norms are counted as their family builds them: "rms" has a weight, "layer" a weight and a bias. `bias` is
about the linear layers of the blocks; the output head never has one.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import UserError

FFN_MULTIPLE = 64  # a derived feed-forward width is rounded up to this, so that tensor parallelism can cut it


def _by_family(llama: Any, gpt2: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda known: {"llama": llama, "gpt2": gpt2}[known["family"]]


def _default_ffn(known: dict[str, Any]) -> int:
    """Four times hidden; a gated feed-forward has three matrices for two, so two thirds of that."""
    hidden: int = known["hidden"]
    return 4 * hidden if known["mlp"] == "gelu" else -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


class ModelConfig(BaseModel):
    """A decoder-only transformer.

    Raises pydantic's ValidationError (a ValueError) that lists everything wrong with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    family: Literal["llama", "gpt2"] = Field(default="llama", description="chooses the defaults of the switches below")
    layers: int = Field(gt=0, description="transformer blocks")
    hidden: int = Field(gt=0, description="width of the residual stream")
    heads: int = Field(gt=0, description="attention heads")
    kv_heads: int = Field(
        default_factory=lambda known: known["heads"], gt=0, description="key and value heads; default: heads"
    )
    head_dim: int = Field(
        default_factory=lambda known: known["hidden"] // known["heads"],
        gt=0,
        description="width of one head; default: hidden / heads",
    )
    mlp: Literal["swiglu", "gelu"] = Field(
        default_factory=_by_family("swiglu", "gelu"), description="feed-forward; default: llama swiglu, gpt2 gelu"
    )
    ffn: int = Field(
        default_factory=_default_ffn,
        gt=0,
        description=f"feed-forward width; default: swiglu 8/3 hidden rounded up to {FFN_MULTIPLE}s, gelu 4 hidden",
    )
    vocab: int = Field(default=0, ge=0, description="tokens in the vocabulary; 0: the tokenizer's")
    max_positions: int = Field(
        default=1024, gt=0, description="longest sequence, in tokens; default in a run file: train.seq_length"
    )
    norm: Literal["rms", "layer"] = Field(
        default_factory=_by_family("rms", "layer"), description="default: llama rms, gpt2 layer"
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="added to the variance in norms")
    positions: Literal["rope", "learned"] = Field(
        default_factory=_by_family("rope", "learned"), description="default: llama rope, gpt2 learned"
    )
    rope_base: float = Field(default=10000.0, gt=0, description="base of the rotary wavelengths")
    bias: bool = Field(
        default_factory=_by_family(False, True), description="biases in the blocks' linear layers; default: gpt2 only"
    )
    tied: bool = Field(
        default_factory=_by_family(False, True), description="output head is the embedding; default: gpt2 only"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability, on embeddings and residual branches")
    attention_dropout: float = Field(default=0.0, ge=0, lt=1, description="probability, on attention weights")
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of initial weights")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if problems := list(self._problems()):
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[str]:
        if self.hidden % self.heads and "head_dim" not in self.model_fields_set:
            yield f"hidden {self.hidden} is not a multiple of heads {self.heads}: change either or give head_dim"
        elif self.positions == "rope" and self.head_dim % 2:
            yield f"head_dim {self.head_dim}: rotary positions turn pairs, so it must be even"
        if self.heads % self.kv_heads:
            fits = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            yield f"kv_heads {self.kv_heads} does not divide heads {self.heads}: {fits} would"

    def with_vocab(self, vocab: int) -> "ModelConfig":
        """The same model over a vocabulary of `vocab` tokens."""
        return ModelConfig(**{**self.model_dump(), "vocab": vocab})

    @property
    def num_parameters(self) -> int:
        """Logical parameters of the whole model, a tied head counted once. The vocabulary must be known."""
        assert self.vocab > 0, "with_vocab() first"
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        learned = self.max_positions * self.hidden if self.positions == "learned" else 0
        return self.layers * self.layer_parameters + embeddings + learned + self._norm_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim
        biases = heads + (self._mlp_matrices - 1) * self.ffn + 2 * self.hidden
        return self._layer_weights + (biases if self.bias else 0) + 2 * self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp == "swiglu" else 2

    @property
    def _layer_weights(self) -> int:
        """Elements of the matrices of one block: query and output, key and value, feed-forward."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + self._mlp_matrices * self.ffn)

    def flops_per_token(self, seq_length: int) -> int:
        """FLOPs of the matrix products of one forward pass, per token; training takes three times as many."""
        return self.layers * self.layer_flops(seq_length) + self.head_flops()

    def layer_flops(self, seq_length: int) -> int:
        """Forward FLOPs of one block, per token. Attention counts the whole seq_length, as if not causal."""
        return 2 * self._layer_weights + 4 * seq_length * self.heads * self.head_dim

    def embedding_flops(self) -> int:
        """Of the embedding, per token: it looks up, and its gradient adds one number per feature."""
        return self.hidden

    def head_flops(self) -> int:
        """Forward FLOPs of the output head, per token."""
        return 2 * self.hidden * self.vocab


# Only what the family does not already say.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-demo": {"family": "llama", "layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2},
        "gpt2": {
            "family": "gpt2",
            "layers": 12,
            "hidden": 768,
            "heads": 12,
            "vocab": 50257,
            "max_positions": 1024,
        },
        "llama2-7b": {
            "family": "llama",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "ffn": 11008,
            "vocab": 32000,
            "max_positions": 4096,
        },
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """A model known by name, some fields changed: `preset("gpt2", layers=2)`. Raises UserError on another name."""
    if name not in PRESETS:
        raise UserError(f'no preset "{name}": there are {", ".join(PRESETS)}')
    return ModelConfig(**{**PRESETS[name], **overrides})
