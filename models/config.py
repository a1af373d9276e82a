"""The configuration of a model: its family, its sizes and the switches by which the families differ.

`ModelConfig` is resolved as soon as it exists: fields that are not given follow from the family or from earlier sizes,
and no field means "decide later". The one exception is `vocab`, which only a tokenizer knows: it is 0 until
`with_vocab`. The counts of parameters and FLOPs are exact functions of the fields, so a run can be planned without
building a model.

Norm parameters are counted as the family has them: "rms" has a weight, "layer" a weight and a bias. The output head,
the experts and their router never have biases.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megaprec.errors import UserError
from models.initial_weights import InitialStd, Matrix
from models.rope import RopeScaling

MOST = 2**31 - 1  # of any size: torch and other formats have 32-bit sizes in places
MOST_EXPERTS = 2**16  # in all layers; each is a module of its own
FFN_MULTIPLE = 64  # a derived feed-forward width is rounded up to this, so that tensor parallelism can shard it


def _by_family(usual: Any, **others: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda known: others.get(known["family"], usual)


def _as_bias(known: dict[str, Any]) -> bool:
    return known["bias"]


def _default_ffn(known: dict[str, Any]) -> int:
    """Return the default feed-forward width: four times hidden, or two thirds of that for a gated feed-forward.

    A gated feed-forward has three matrices instead of two, so both have the same number of parameters.
    """
    hidden: int = known["hidden"]
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE if known["mlp"] == "swiglu" else 4 * hidden


class ModelConfig(BaseModel):
    """A decoder-only transformer.

    Raises pydantic's ValidationError (a ValueError) that lists every problem with the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    family: Literal["llama", "gpt2", "gpt_neox", "mistral", "qwen2", "qwen3", "mixtral"] = Field(
        default="llama", description="Model family, which sets the defaults of the keys below."
    )
    layers: int = Field(gt=0, le=4096, description="Number of transformer layers.")
    hidden: int = Field(gt=0, le=MOST, description="Hidden size: width of the residual stream.")
    heads: int = Field(gt=0, le=65_536, description="Number of attention heads.")
    kv_heads: int = Field(
        default_factory=lambda known: known["heads"],
        gt=0,
        le=65_536,
        description="Number of key and value heads (grouped-query attention); default: model.heads.",
    )
    head_dim: int = Field(
        default_factory=lambda known: known["hidden"] // known["heads"],
        gt=0,
        le=MOST,
        description="Width of one attention head; default, and if 0: model.hidden / model.heads.",
    )
    mlp: Literal["swiglu", "gelu", "gelu_exact"] = Field(
        default_factory=_by_family("swiglu", gpt2="gelu", gpt_neox="gelu_exact"),
        description="Feed-forward: swiglu, gelu (tanh approximation) or gelu_exact; default: swiglu, for gpt2 gelu, "
        "for "
        "gpt_neox gelu_exact.",
    )
    ffn: int = Field(
        default_factory=_default_ffn,
        gt=0,
        le=MOST,
        description="Feed-forward width, of each expert in a model with experts; default: for swiglu 8/3 of "
        "model.hidden, "
        f"rounded up to a multiple of {FFN_MULTIPLE}, otherwise 4 times model.hidden.",
    )
    vocab: int = Field(default=0, ge=0, le=MOST, description="Vocabulary size, in tokens; 0: the tokenizer's.")
    max_positions: int = Field(
        default=1024, gt=0, le=MOST, description="Longest sequence, in tokens; default in a run file: train.seq_length."
    )
    norm: Literal["rms", "layer"] = Field(
        default_factory=_by_family("rms", gpt2="layer", gpt_neox="layer"),
        description="Norm: RMSNorm (rms) or LayerNorm (layer); default: rms, for gpt2 and gpt_neox layer.",
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Epsilon that norms add to the variance.")
    qk_norm: bool = Field(
        default_factory=_by_family(False, qwen3=True),
        description="RMSNorm on the query and key of each head, before rotary positions; default: true for qwen3.",
    )
    parallel_residual: bool = Field(
        default_factory=_by_family(False, gpt_neox=True),
        description="Attention and feed-forward both read the input of the layer; default: true for gpt_neox.",
    )
    positions: Literal["rope", "learned"] = Field(
        default_factory=_by_family("rope", gpt2="learned"),
        description="Position embeddings: rotary (rope) or learned; default: rope, for gpt2 learned.",
    )
    rope_base: float = Field(default=10000.0, gt=1, description="Base of the rotary wavelengths (rope_theta).")
    rotary_fraction: float = Field(
        default_factory=_by_family(1.0, gpt_neox=0.25),
        gt=0,
        le=1,
        description="Fraction of each head's features, counted from the first, that get rotary positions; default: "
        "1.0, for "
        "gpt_neox 0.25.",
    )
    rope_scaling: RopeScaling = Field(
        default=RopeScaling(),
        strict=False,
        description='Scaling of rotary positions to longer sequences, such as {kind = "linear", factor = 2.0}; kinds: '
        "none, linear, dynamic, llama3 and yarn, with Hugging Face's keys.",
    )
    window: int = Field(
        default=0,
        ge=0,
        le=MOST,
        description="Sliding window of attention, in tokens, the token itself included; 0: all tokens before.",
    )
    window_layers: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description="Numbers of the layers, from 0, that have the sliding window; empty: all layers.",
    )
    bias: bool = Field(
        default_factory=_by_family(False, gpt2=True, gpt_neox=True),
        description="Default of model.qkv_bias, model.output_bias and model.mlp_bias; default: true for gpt2 and "
        "gpt_neox.",
    )
    qkv_bias: bool = Field(
        default_factory=lambda known: known["bias"] or known["family"] == "qwen2",
        description="Biases of the query, key and value projections; default: model.bias, for qwen2 true.",
    )
    output_bias: bool = Field(
        default_factory=_as_bias, description="Bias of attention's output projection; default: model.bias."
    )
    mlp_bias: bool = Field(default_factory=_as_bias, description="Biases of the feed-forward; default: model.bias.")
    tied: bool = Field(
        default_factory=_by_family(False, gpt2=True),
        description="The output head shares the weight of the embedding; default: true for gpt2.",
    )
    experts: int = Field(
        default_factory=_by_family(0, mixtral=8),
        ge=0,
        le=65_536,
        description="Number of experts per layer (mixture of experts); 0: one feed-forward and no router; default: "
        "0, for "
        "mixtral 8.",
    )
    experts_per_token: int = Field(
        default=2, gt=0, le=65_536, description="Number of experts that the router chooses for each token."
    )
    norm_topk: bool = Field(
        default=True, description="Normalize the router's weights of a token's experts to a sum of one."
    )
    router_aux_loss: float = Field(
        default=0.01, ge=0, description="Weight of the load-balancing loss of each layer with experts."
    )
    router_z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the z-loss, which keeps the router's logits small, of each layer with experts.",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability at the places of model.dropout_at."
    )
    dropout_at: Literal["branches", "stream"] = Field(
        default="branches",
        description="Places of dropout. branches: the embedding and the outputs of attention and feed-forward; stream: "
        "the input of each layer and the output of attention, as in InternEvo.",
    )
    embedding_dropout: float = Field(
        default_factory=lambda known: known["dropout"],
        ge=0,
        lt=1,
        description="Dropout probability of embeddings, unless model.dropout_at is stream; default: model.dropout.",
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of attention probabilities."
    )
    embedding_grad_scale: float = Field(
        default=1.0, gt=0, le=1, description="Factor of the embedding's gradient, without the part of a tied head."
    )
    head_grad_scale: float = Field(
        default=1.0, gt=0, le=1, description="Factor of the gradient of the output head's weight."
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of initial weights.")
    init: InitialStd = Field(
        default=InitialStd(),
        strict=False,
        description="Standard deviation of initial weights by kind of matrix, such as {embedding = 0.01, qkv = 0.006}; "
        f"keys: {', '.join(InitialStd.model_fields)}; empty: model.init_std for all.",
    )
    factory: str = Field(
        default="",
        description='Factory of a custom model, as "file.py:function" or "package.module:function" (docs/parity.md); '
        "empty: the built-in family of model.family.",
    )

    @model_validator(mode="before")
    @classmethod
    def _zero_head_dim_is_not_given(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("head_dim") == 0:
            return {key: value for key, value in given.items() if key != "head_dim"}
        return given

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if problems := list(self._problems()):
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[str]:
        if self.hidden % self.heads and "head_dim" not in self.model_fields_set:
            yield f"hidden {self.hidden} is not a multiple of heads {self.heads}: change either or give head_dim"
        elif self.positions == "rope":
            yield from self._rotary_problems()
        if self.heads % self.kv_heads:
            fits = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            yield f"kv_heads {self.kv_heads} does not divide heads {self.heads}: choose one of {fits}"
        if self.positions != "rope" and (self.rope_scaling.kind != "none" or self.rotary_fraction != 1):
            yield f'positions "{self.positions}": rope_scaling and rotary_fraction need positions = "rope"'
        yield from self._window_problems()
        if self.experts:
            yield from self._expert_problems()

    def _window_problems(self) -> Iterator[str]:
        if self.window_layers and not self.window:
            yield f"window_layers {[*self.window_layers]}: there is no window; give model.window"
        if sorted({n for n in self.window_layers if 0 <= n < self.layers}) != [*self.window_layers]:
            yield f"window_layers {[*self.window_layers]}: give numbers from 0 to {self.layers - 1} in increasing order"

    def _rotary_problems(self) -> Iterator[str]:
        turning, scaling = self.rotary_dims, self.rope_scaling.kind
        if turning % 2 or not turning:
            part = f"{self.rotary_fraction:g} of it" if self.rotary_fraction < 1 else "all of it"
            yield (
                f"head_dim {self.head_dim}: rotary positions rotate pairs of features, so their number must be "
                f"even and above 0, but it is {turning} ({part}): change head_dim or rotary_fraction"
            )
        elif scaling == "dynamic" and turning == 2:
            yield "rope_scaling.kind dynamic needs more than one rotated pair: raise head_dim or rotary_fraction"

    def _expert_problems(self) -> Iterator[str]:
        if self.experts_per_token > self.experts:
            yield (
                f"experts_per_token {self.experts_per_token} is more than experts {self.experts}: "
                f"choose at most {self.experts}"
            )
        if self.layers * self.experts > MOST_EXPERTS:
            yield (
                f"layers {self.layers} x experts {self.experts} are more than {MOST_EXPERTS:,} feed-forwards: "
                "choose fewer of either"
            )
        if self.mlp_bias:
            yield f"mlp_bias true: the {self.experts} experts have no biases; set mlp_bias = false"

    def with_vocab(self, vocab: int) -> "ModelConfig":
        """Return this model with a vocabulary of `vocab` tokens."""
        return ModelConfig(**{**self.model_dump(), "vocab": vocab})

    def of_layer(self, number: int) -> "ModelConfig":
        """Return this model as layer `number` sees it: without the window if the layer has none."""
        has_none = self.window_layers and number not in self.window_layers
        return self.model_copy(update={"window": 0, "window_layers": ()}) if has_none else self

    @property
    def num_parameters(self) -> int:
        """Return the number of logical parameters, a tied head counted once. The vocabulary must be known."""
        assert self.vocab > 0, "with_vocab() first"
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        learned = self.max_positions * self.hidden if self.positions == "learned" else 0
        return self.layers * self.layer_parameters + embeddings + learned + self._norm_parameters

    @property
    def rotary_dims(self) -> int:
        """Return the number of features of each head that rotary positions turn."""
        return int(self.head_dim * self.rotary_fraction)

    def initial_std(self, matrix: Matrix, layer: int = 0) -> float:
        """Return the standard deviation of the initial weights of a kind of matrix in layer `layer`, from 0."""
        return self.init.std(matrix, self.init_std, self.layers, layer)

    @property
    def undrawn(self) -> "ModelConfig":
        """Return this model with initial weights of zero, which take no time to draw, if their values do not matter."""
        return self.model_copy(update={"init_std": 0.0, "init": InitialStd()})

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one block."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        up = (self._mlp_matrices - 1) * self.ffn
        biases = self.qkv_bias * qkv + self.output_bias * self.hidden + self.mlp_bias * (up + self.hidden)
        norms = 2 * self._norm_parameters + self.qk_norm * 2 * self.head_dim
        return self._attention_weights + self._mlp_weights(self.experts) + biases + norms

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp == "swiglu" else 2

    @property
    def _attention_weights(self) -> int:
        """Return the number of elements of the matrices of query, key, value and output."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    def _mlp_weights(self, experts: int) -> int:
        """Return the elements of the feed-forward matrices, or of the router and `experts` experts."""
        one = self.hidden * self._mlp_matrices * self.ffn
        return experts * one + self.hidden * self.experts if self.experts else one

    def flops_per_token(self, seq_length: int) -> int:
        """Return the FLOPs of the matrix products of a forward pass, per token; training takes three times as many."""
        return self.layers * self.layer_flops(seq_length) + self.head_flops()

    def layer_flops(self, seq_length: int) -> int:
        """Return the forward FLOPs of one block, per token.

        Attention counts the whole seq_length or window, as if it were not causal.
        """
        weights = self._attention_weights + self._mlp_weights(self.experts_per_token)
        return 2 * weights + self.attention_flops(seq_length)

    def attention_flops(self, seq_length: int) -> int:
        """Return the forward FLOPs of one block's attention products that have no weight, per token.

        If only some layers have a window, this is the mean over the layers. Attention is counted as if it were not
        causal.
        """
        windowed = len(self.window_layers) or self.layers
        seen = windowed * min(seq_length, self.window or seq_length) + (self.layers - windowed) * seq_length
        return 4 * seen * self.heads * self.head_dim // self.layers

    def again_flops(self, seq_length: int) -> int:
        """Return the FLOPs, per token, of recomputing one whole block in its backward pass.

        The last product of a block is not recomputed, because no gradient needs its result, unless dropout or expert
        weights are applied to it.
        """
        unneeded = 0 if self.experts or self.dropout else 2 * self.hidden * self.ffn
        return self.layer_flops(seq_length) - unneeded

    def embedding_flops(self) -> int:
        """Return the FLOPs of the embedding, per token: its gradient adds one number per feature; a lookup is free."""
        return self.hidden

    def head_flops(self) -> int:
        """Return the forward FLOPs of the output head, per token."""
        return 2 * self.hidden * self.vocab
