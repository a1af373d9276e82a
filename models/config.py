"""The configuration of a model: its family, its sizes and the switches by which families differ.

`ModelConfig` is resolved as soon as it exists: fields that are not given follow from the family or
from earlier sizes, and no field means "decide later". The one exception is `vocab`, which only a
tokenizer knows: it is 0 until `with_vocab`. The counts of parameters and FLOPs are exact functions
of the fields, so a run can be planned without building a model.

Norm parameters are counted as the model has them: a weight but without `norm_weight`, and a bias
with `norm_bias`.
The output head never has a bias.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Self

from pydantic import model_validator

from megaprec.errors import Problem, UserError
from models.activations import ACTIVATIONS
from models.delta_net import NO_DELTA_NET
from models.initial_weights import InitialStd, Matrix
from models.latent import NO_LATENT
from models.mamba import NO_MAMBA
from models.model_fields import BESIDE, ModelFields, default_attention_scalar
from models.mup import Mup, scaled_widths
from models.router_settings import CORRECTED, PLAIN

# In all layers: each expert is a module of its own.
MOST_EXPERTS = 2**16
# Keys that are not known in models whose layers without a window have heads of their own.
_BESIDE_GLOBAL_HEADS = ("latent", "delta_net", "hybrid_pattern", "mup_base_hidden", "factory")


class ModelConfig(ModelFields):
    """A decoder-only transformer.

    Raises pydantic's ValidationError (a ValueError) that lists every problem with the fields.
    """

    @model_validator(mode="before")
    @classmethod
    def _ignore_zero_head_dim(cls, fields: Any) -> Any:
        """Return the fields without `head_dim = 0`, which means the default as if it were not
        given."""
        given = fields.get("head_dim") if isinstance(fields, dict) else None
        # `false` equals 0 too: it is left, and refused for its type
        if given == 0 and type(given) is int:
            return {key: value for key, value in fields.items() if key != "head_dim"}
        return fields

    @model_validator(mode="after")
    def _require_valid(self) -> Self:
        if problems := list(self._problems()):
            raise UserError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield a line for each reason why these fields make no model, or why one has no effect."""
        yield from self._pair_problems()
        yield from self._head_problems()
        if self.latent:
            yield from self._latent_problems()
        yield from self._delta_problems()
        yield from self._hybrid_problems()
        yield from self._window_problems()
        yield from self._global_problems()
        yield from self._norm_problems()
        yield from self._dense_problems()
        if self.experts:
            yield from self._expert_problems()
        # The two defaults: any other value was given, for nothing.
        elif self.router not in (PLAIN, CORRECTED):
            yield Problem.of("model.router_without_experts")
        yield from self._nope_problems()
        yield from self._mtp_problems()
        yield from self._mup_problems()
        yield from self._unused_keys()

    def _pair_problems(self) -> Iterator[Problem]:
        """Yield a problem for each two keys that are on and that one model cannot have together."""
        for key, beside in BESIDE.items():
            if not getattr(self, key):
                continue
            for other in beside.not_with:
                if getattr(self, other):
                    yield Problem.of("model.not_beside", key=key, other=other)

    def _head_problems(self) -> Iterator[Problem]:
        """Yield the problems of the numbers and widths of heads, and of positions."""
        # A head_dim that is given, or follows from latents, need not divide hidden.
        has_default_width = not self.latent and "head_dim" not in self.model_fields_set
        if self.hidden % self.heads and has_default_width:
            yield Problem.of("model.hidden_not_multiple", hidden=self.hidden, heads=self.heads)
        elif self.positions == "rope":
            yield from self._rotary_problems()
        if self.heads % self.kv_heads:
            divisors = [str(count) for count in range(1, self.heads + 1) if self.heads % count == 0]
            yield Problem.of(
                "model.kv_heads_not_divisor",
                kv_heads=self.kv_heads,
                heads=self.heads,
                divisors=", ".join(divisors),
            )
        yield from self._position_problems()

    def _position_problems(self) -> Iterator[Problem]:
        if self.rope_scaling.query_beta and (self.latent or self.window_rope_base):
            yield Problem.of("model.query_beta_beside", value=self.rope_scaling.query_beta)
        sets_rotary = self.rope_scaling.kind != "none" or self.rotary_fraction != 1
        if self.positions != "rope" and sets_rotary:
            yield Problem.of("model.rotary_keys_unused", positions=self.positions)

    def _nope_problems(self) -> Iterator[Problem]:
        """Yield the problem of `nope_layers`, layers whose attention has no rotary positions."""
        if not self.nope_layers:
            return
        if not self._are_layers(self.nope_layers):
            yield self._no_layers("nope_layers")
        elif not self._can_do_without_positions(self.nope_layers):
            yield Problem.of("model.nope_layers_unused", nope_layers=[*self.nope_layers])
        elif len(self.nope_layers) == self.layers:
            yield Problem.of("model.nope_layers_all")

    def _can_do_without_positions(self, layers: Sequence[int]) -> bool:
        """Return True if all of these layers have attention that would rotate its heads."""
        rotates = self.positions == "rope" and not self.latent
        return rotates and set(layers) <= set(self.attention_layers)

    def _mtp_problems(self) -> Iterator[Problem]:
        """Yield what modules of multi-token prediction are not known with."""
        # The modules have no table of learned positions.
        if self.mtp_layers and self.positions == "learned":
            yield Problem.of(
                "model.mtp_positions", mtp_layers=self.mtp_layers, positions=self.positions
            )
        if self.mtp_layers and self.factory:
            yield Problem.of("model.mtp_factory", mtp_layers=self.mtp_layers, factory=self.factory)

    def _mup_problems(self) -> Iterator[Problem]:
        """Yield what muP cannot scale from its base model, and its keys that have no effect."""
        base = self.mup_base_hidden
        base_head_dim = self.mup_base_head_dim
        if not base:
            if base_head_dim:
                yield Problem.of("model.mup_base_head_dim_unused", value=base_head_dim)
            return
        scalar = default_attention_scalar(dict(self))
        if base_head_dim and self.attention_scalar != scalar:
            yield Problem.of(
                "model.mup_attention_scalar",
                value=self.attention_scalar,
                base=base_head_dim,
                scalar=scalar,
            )
        if self.tied and self.mtp_layers:
            yield Problem.of("model.mup_tied_mtp", base=base, mtp_layers=self.mtp_layers)
        if self.factory:
            yield Problem.of("model.mup_factory", base=base, factory=self.factory)
        yield from self._mup_width_problems()

    def _mup_width_problems(self) -> Iterator[Problem]:
        """Yield the widths that would be no whole numbers in the base model, which has them smaller
        by the factor hidden / mup_base_hidden."""
        base = self.mup_base_hidden
        for key, width in scaled_widths(self).items():
            if width * base % self.hidden == 0:
                continue
            # the nearest widths that are whole there, if they are above 0
            multiple = self.hidden // gcd(self.hidden, base)
            below = width // multiple * multiple
            choices = [str(choice) for choice in (below, below + multiple) if choice]
            yield Problem.of(
                "model.mup_width",
                key=key,
                value=width,
                base=base,
                factor=self.hidden / base,
                nearest=" or ".join(choices),
            )

    def _unused_keys(self) -> Iterator[Problem]:
        """Yield keys that were given though they change nothing in this model, and an activation
        with learned numbers, which experts do not have."""
        # The losses of a custom model are its own.
        if self.z_loss and self.factory:
            yield Problem.of("model.z_loss_factory", z_loss=self.z_loss, factory=self.factory)
        for key in ("swiglu_alpha", "swiglu_limit"):
            value = getattr(self, key)
            default = type(self).model_fields[key].default
            if self.mlp != "swiglu_clamped" and value != default:
                yield Problem.of("model.clamp_unused", key=key, value=value, mlp=self.mlp)
        if self.experts and ACTIVATIONS[self.mlp].parameters:
            yield Problem.of("model.learned_activation_experts", mlp=self.mlp)
        for key in ("expert_bias", "router_bias"):
            if getattr(self, key) and not self.experts:
                yield Problem.of("model.bias_without_experts", key=key)

    def _window_problems(self) -> Iterator[Problem]:
        """Yield the problems of the keys of layers with the sliding window."""
        # window_layers and window_rope_base change nothing without a window.
        if self.window_layers and not self.window:
            yield Problem.of("model.window_layers_unused", window_layers=[*self.window_layers])
        rotates_windows = self.window and self.positions == "rope" and self.window_rope_base > 1
        if self.window_rope_base and not rotates_windows:
            yield Problem.of(
                "model.window_rope_base_unused", window_rope_base=self.window_rope_base
            )
        if not self._are_layers(self.window_layers):
            yield self._no_layers("window_layers")

    def _global_problems(self) -> Iterator[Problem]:
        """Yield the problems of the heads that layers without the window have, other than those of
        layers with it."""
        sizes = [key for key in ("global_head_dim", "global_kv_heads") if getattr(self, key)]
        given = list(sizes)
        if self.global_key_as_value:
            given.append("global_key_as_value")
        if not given:
            return
        yield from self._unused_global_heads(sizes)
        for key in _BESIDE_GLOBAL_HEADS:
            if getattr(self, key):
                yield Problem.of("model.global_heads_beside", key=key, given=given[0])
        if self.global_kv_heads and self.heads % self.global_kv_heads:
            yield Problem.of("model.global_kv_heads", value=self.global_kv_heads, heads=self.heads)
        if sizes and self.positions == "rope":
            yield from self._global_rotary_problems(sizes[0])

    def _unused_global_heads(self, sizes: Sequence[str]) -> Iterator[Problem]:
        """Yield a problem for each key of heads of layers without the window, if all layers are
        alike, or none is without it. sizes: those keys of numbers that are above 0."""
        layers_are_alike = len(self.window_layers) in (0, self.layers)
        if layers_are_alike:
            # head_dim and kv_heads say the heads of such layers
            for key in sizes:
                yield Problem.of("model.global_heads_unused", key=key, value=getattr(self, key))
        if self.window and not self.window_layers:
            yield Problem.of("model.global_value_unused")

    def _global_rotary_problems(self, given: str) -> Iterator[Problem]:
        """Yield the problems of rotary positions where layers without the window have heads of
        their own. given: a key that says that they have."""
        if self.window and not self.window_rope_base:
            yield Problem.of("model.global_heads_rope", key=given)
        rotary_dims = self.unwindowed.rotary_dims
        if self.global_head_dim and rotary_dims % 2:
            yield Problem.of(
                "model.global_head_dim_rope", value=self.global_head_dim, rotary_dims=rotary_dims
            )

    def _are_layers(self, numbers: Sequence[int]) -> bool:
        """Return True if these are numbers of layers in increasing order."""
        valid = {number for number in numbers if 0 <= number < self.layers}
        return sorted(valid) == [*numbers]

    def _no_layers(self, key: str) -> Problem:
        """Return the problem that the value of `key` is no list of numbers of layers in increasing
        order."""
        return Problem.of(
            "model.layer_numbers", key=key, value=[*getattr(self, key)], last=self.layers - 1
        )

    def _latent_problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that latent attention needs at another value."""
        required = {
            # what would be rotated is left as it is without positions, as in Kimi Linear
            "positions": "none" if self.positions == "none" else "rope",
            "kv_heads": self.heads,
            "head_dim": self.latent.head_dim,
            "rotary_fraction": 1.0,
            "norm": "rms",
        }
        for key, required_value in required.items():
            value = getattr(self, key)
            if value != required_value:
                yield Problem.of(
                    "model.latent_needs",
                    key=key,
                    value=json.dumps(value),
                    required=json.dumps(required_value),
                )

    def _delta_problems(self) -> Iterator[Problem]:
        """Yield the problems of layers with a gated delta net."""
        if not self.delta_net:
            if self.delta_layers:
                value = [*self.delta_layers]
                yield Problem.of("model.delta_layers_unused", delta_layers=value)
            return
        if not self._are_layers(self.delta_layers):
            yield self._no_layers("delta_layers")
        elif not self.delta_layers:
            yield Problem.of("model.delta_layers_missing")

    def _hybrid_problems(self) -> Iterator[Problem]:
        """Yield the problems of `hybrid_pattern`, whose layers have one branch each."""
        pattern = self.hybrid_pattern
        if self.mamba and "M" not in pattern:
            yield Problem.of("model.mamba_unused", pattern=pattern)
        if not pattern:
            return
        yield from self._branch_problems(pattern)
        if len(pattern) != self.layers:
            yield Problem.of(
                "model.hybrid_layers", pattern=pattern, kinds=len(pattern), layers=self.layers
            )
        required = {"norm_at": "before", "parallel_residual": False, "dropout_at": "branches"}
        for key, required_value in required.items():
            value = getattr(self, key)
            if value != required_value:
                yield Problem.of(
                    "model.hybrid_needs",
                    key=key,
                    value=json.dumps(value),
                    required=json.dumps(required_value),
                )
        # A module has a layer as the model's last, which has one branch alone here.
        if self.mtp_layers:
            yield Problem.of("model.hybrid_mtp", mtp_layers=self.mtp_layers, last=pattern[-1])

    def _branch_problems(self, pattern: str) -> Iterator[Problem]:
        """Yield the problems of letters of `hybrid_pattern` whose branch the model does not
        configure, and of keys of branches that no letter names."""
        if "M" in pattern and not self.mamba:
            yield Problem.of("model.mamba_missing", pattern=pattern)
        if "E" in pattern and not self.experts:
            yield Problem.of("model.hybrid_experts_missing", pattern=pattern)
        if "E" not in pattern and self.experts:
            yield Problem.of("model.hybrid_experts_unused", experts=self.experts, pattern=pattern)
        for key, beside in BESIDE.items():
            if beside.of_attention and "*" not in pattern and getattr(self, key):
                yield Problem.of("model.hybrid_unused", key=key, pattern=pattern)

    def _norm_problems(self) -> Iterator[Problem]:
        """Yield the problems of the keys of norms, and of where branches read them."""
        if self.norm_bias and self.norm != "layer":
            yield Problem.of("model.norm_bias_of_rms")
        # LayerNorm has no such offset.
        if self.norm_unit_offset and self.norm != "rms":
            yield Problem.of("model.norm_unit_offset_unused")
        if self.parallel_residual and self.norm_at != "before":
            yield Problem.of("model.parallel_residual_norm", norm_at=self.norm_at)
        if self.shared_norm and not self.parallel_residual:
            yield Problem.of("model.shared_norm_unused")
        if not self.norm_weight:
            yield from self._weightless_norm_problems()

    def _weightless_norm_problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that norms without weights need at another value."""
        required = {"norm": "rms", "norm_unit_offset": False, "mup_base_hidden": 0}
        if self.qk_norm:
            required["qk_norm_over"] = "head"
        for key, required_value in required.items():
            value = getattr(self, key)
            if value != required_value:
                yield Problem.of(
                    "model.norm_weight_needs",
                    key=key,
                    value=json.dumps(value),
                    required=json.dumps(required_value),
                )

    def _rotary_problems(self) -> Iterator[Problem]:
        """Yield the problem of the number of features of a head that rotary positions turn."""
        rotary_dims = self.rotary_dims
        if rotary_dims % 2 or not rotary_dims:
            part = f"{self.rotary_fraction:g} of it" if self.rotary_fraction < 1 else "all of it"
            yield Problem.of(
                "model.rotary_dims", head_dim=self.head_dim, rotary_dims=rotary_dims, part=part
            )
        elif self.rope_scaling.kind == "dynamic" and rotary_dims == 2:
            # Its exponent is dims / (dims - 2).
            yield Problem.of("model.dynamic_one_pair")

    def _expert_problems(self) -> Iterator[Problem]:
        """Yield the problems of the keys of experts, of a model that has some."""
        if self.experts_per_token > self.experts:
            yield Problem.of(
                "model.experts_per_token",
                experts_per_token=self.experts_per_token,
                experts=self.experts,
            )
        if self.layers * self.experts > MOST_EXPERTS:
            yield Problem.of(
                "model.most_experts", layers=self.layers, experts=self.experts, most=MOST_EXPERTS
            )
        yield from self.router.problems(self.experts, self.experts_per_token)
        if self.mlp_bias:
            yield Problem.of("model.mlp_bias_of_experts", experts=self.experts)

    def _dense_problems(self) -> Iterator[Problem]:
        """Yield the problems of the feed-forwards that a model with experts has besides these: of
        layers without experts, and of the shared experts."""
        dense_layers = [*self.dense_layers]
        if not self._are_layers(self.dense_layers):
            yield self._no_layers("dense_layers")
        elif len(self.dense_layers) == self.layers:
            yield Problem.of("model.all_layers_dense", dense_layers=dense_layers)
        if not self.experts and (self.dense_layers or self.shared_experts):
            key = "dense_layers" if self.dense_layers else "shared_experts"
            value = json.dumps(getattr(self, key))
            yield Problem.of("model.no_experts_beside", key=key, value=value)
        if self.shared_gate and not self.shared_experts:
            yield Problem.of("model.shared_gate_unused")
        if not self._has_dense_ffn and self.dense_ffn != self.ffn:
            yield Problem.of("model.dense_ffn_unused", dense_ffn=self.dense_ffn)

    def with_vocab(self, vocab: int) -> "ModelConfig":
        """Return this model with a vocabulary of `vocab` tokens."""
        # Built anew and not copied, so that the fields are validated.
        return ModelConfig(**{**self.model_dump(), "vocab": vocab})

    def of_layer(self, number: int) -> "ModelConfig":
        """Return a model whose keys describe layer `number` alone: without the window, the experts,
        the gated delta net or the Mamba-2 mixer that the layer does not have."""
        model = self.kind_of_layer(number)
        # Heads of layers without the window go by its layers already.
        if self.has_global_heads:
            return model
        # Without window_layers the window, if there is one, is that of all layers.
        if self.window_layers and number not in self.window_layers:
            return model.model_copy(update={"window": 0, "window_layers": ()})
        return model

    @property
    def dense(self) -> "ModelConfig":
        """Return a model whose keys describe this one's layers without experts."""
        without_experts = {
            "experts": 0,
            "shared_experts": 0,
            "shared_gate": False,
            "dense_layers": (),
            "router": PLAIN,
            "ffn": self.dense_ffn,
        }
        return self.model_copy(update=without_experts)

    @property
    def attending(self) -> "ModelConfig":
        """Return a model whose keys describe this one's layers with attention: without a gated
        delta net."""
        if not self.delta_net:
            return self
        return self.model_copy(update={"delta_net": NO_DELTA_NET, "delta_layers": ()})

    @property
    def recurring(self) -> "ModelConfig":
        """Return a model whose keys describe this one's layers with a gated delta net: without
        latents."""
        return self.model_copy(update={"latent": NO_LATENT}) if self.latent else self

    @property
    def has_global_heads(self) -> bool:
        """Return True if layers without the window have heads of their own."""
        sizes = self.global_head_dim or self.global_kv_heads
        return bool(sizes) or self.global_key_as_value

    @property
    def windowed(self) -> "ModelConfig":
        """Return a model whose keys describe this one's layers with the window, where the others
        have heads of their own."""
        without_others = {
            "window_layers": (),
            "global_head_dim": 0,
            "global_kv_heads": 0,
            "global_key_as_value": False,
        }
        return self.model_copy(update=without_others)

    @property
    def unwindowed(self) -> "ModelConfig":
        """Return a model whose keys describe this one's layers without the window, with the heads
        that these have."""
        own_heads = {
            "head_dim": self.global_head_dim or self.head_dim,
            "kv_heads": self.global_kv_heads or self.kv_heads,
            "window": 0,
            "window_layers": (),
            "window_rope_base": 0.0,
            "global_head_dim": 0,
            "global_kv_heads": 0,
        }
        return self.model_copy(update=own_heads)

    def kind_of_layer(self, number: int) -> "ModelConfig":
        """Return a model whose keys describe layer `number`, but for its window: its feed-forward
        or experts, the heads of its attention, a gated delta net or a Mamba-2 mixer only if the
        layer has one, and its letter of `hybrid_pattern`.

        It is the same for all layers of a kind.
        """
        if self.hybrid_pattern:
            letter = self.hybrid_pattern[number]
            kind = self if letter == "E" else self.dense
            mamba = self.mamba if letter == "M" else NO_MAMBA
            return kind.model_copy(update={"hybrid_pattern": letter, "mamba": mamba})
        kind = self.dense if number in self.dense_layers else self
        if self.has_global_heads:
            return kind.windowed if number in self.window_layers else kind.unwindowed
        return kind.recurring if number in self.delta_layers else kind.attending

    def layers_of(self, letter: str) -> tuple[int, ...]:
        """Return the numbers of the layers that have a letter in `hybrid_pattern`."""
        kinds = enumerate(self.hybrid_pattern)
        return tuple(number for number, kind in kinds if kind == letter)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have experts."""
        if not self.experts:
            return ()
        if self.hybrid_pattern:
            return self.layers_of("E")
        dense = {*self.dense_layers}
        return tuple(number for number in range(self.layers) if number not in dense)

    @property
    def _has_dense_ffn(self) -> bool:
        """Return True if `dense_ffn` is the width of a layer: of one without experts beside layers
        with them."""
        if self.hybrid_pattern:
            return self.experts > 0 and "-" in self.hybrid_pattern
        return bool(self.dense_layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have attention."""
        if self.hybrid_pattern:
            return self.layers_of("*")
        delta = {*self.delta_layers}
        return tuple(number for number in range(self.layers) if number not in delta)

    @property
    def has_mixer(self) -> bool:
        """Return True if a layer of this kind (`kind_of_layer`) has attention or something in its
        place."""
        return self.hybrid_pattern not in ("-", "E")

    @property
    def has_feed_forward(self) -> bool:
        """Return True if a layer of this kind (`kind_of_layer`) has a feed-forward or experts."""
        return self.hybrid_pattern in ("", "-", "E")

    @property
    def branches(self) -> int:
        """Return the number of branches of a layer of this kind (`kind_of_layer`)."""
        return self.has_mixer + self.has_feed_forward

    def divides_recurrence(self, ranks: int) -> bool:
        """Return True if `ranks` ranks can share gated delta nets and Mamba-2 mixers evenly, or if
        there are none."""
        return self.delta_net.divides(ranks) and self.mamba.divides(ranks)

    def fits_tensor(self, ranks: int) -> bool:
        """Return True if `ranks` tensor-parallel ranks can share each layer evenly."""
        kv_heads = {self.kv_heads, self.global_kv_heads or self.kv_heads}
        # key/value heads that are fewer than ranks are held by several ranks each
        if any(count % ranks and ranks % count for count in kv_heads):
            return False
        shared_out = [*self.ffn_widths.values(), self.heads]
        if self.mtp_layers:
            shared_out.append(self.hidden)  # features of the projection of a module
        return not any(count % ranks for count in shared_out) and self.divides_recurrence(ranks)

    @property
    def mixer(self) -> str:
        """Return "attention" for a layer of this kind (`kind_of_layer`), or the name of what it has
        in place of attention: "delta_net" or "mamba"."""
        if self.delta_net:
            return "delta_net"
        return "mamba" if self.mamba else "attention"

    @property
    def mixer_width(self) -> int:
        """Return the number of features that the output projection reads, in a layer of this kind
        (`kind_of_layer`), of attention or of what the layer has in its place; 0 if it has
        neither."""
        if not self.has_mixer:
            return 0
        if self.delta_net:
            return self.delta_net.value_width
        if self.mamba:
            return self.mamba.width
        return self.heads * (self.latent.value_dim or self.head_dim)

    def over_layers(
        self, measure: Callable[["ModelConfig"], int], layers: Collection[int] | None = None
    ) -> int:
        """Return the sum of a number over layers.

        measure: returns the number of one layer, from the model of its kind (`kind_of_layer`).
        layers: their numbers; None: all.
        """
        numbers = range(self.layers) if layers is None else layers
        return sum(count * measure(kind) for kind, count in self.count_kinds(numbers))

    def count_kinds(self, layers: Iterable[int]) -> Iterator[tuple["ModelConfig", int]]:
        """Yield each kind of layer (`kind_of_layer`) with how many of `layers` are of it. A layer
        may be in `layers` several times."""
        # what the cache of `_count_alike` takes as a key
        numbers = layers if isinstance(layers, range) else tuple(layers)
        for example, count in _count_alike(self._layers_by_kind, self.hybrid_pattern, numbers):
            yield self.kind_of_layer(example), count

    def kind_keys(self, layers: Iterable[int]) -> list[tuple[bool, bool, bool, str]]:
        """Return, for each of `layers`, what tells its kind from others: whether it has a
        feed-forward in place of experts, whether a gated delta net, whether a window beside layers
        with other heads, and its letter in `hybrid_pattern`."""
        return _kind_keys(self._layers_by_kind, self.hybrid_pattern, layers)

    @property
    def _layers_by_kind(self) -> "LayersByKind":
        """Return the numbers of the layers of other kinds, as `LayersByKind` has them."""
        beside_global_heads = self.window_layers if self.has_global_heads else ()
        return self.dense_layers, self.delta_layers, beside_global_heads

    @property
    def without_mtp(self) -> "ModelConfig":
        """Return this model without modules of multi-token prediction, as it is evaluated and
        generates text."""
        if self.mtp_layers:
            return self.model_copy(update={"mtp_layers": 0})
        return self

    def mtp_flops(self, seq_length: int) -> int:
        """Return the forward FLOPs of all modules of multi-token prediction, each with the head,
        per token."""
        projection_weights = 2 * self.hidden * self.hidden
        projection = 2 * projection_weights  # each weight is one product and one sum
        # a module has a layer such as the model's last one
        last_kind = self.kind_of_layer(self.layers - 1)
        layer = last_kind.layer_flops(seq_length)
        return self.mtp_layers * (layer + projection + self.head_flops())

    @property
    def ffn_widths(self) -> dict[str, int]:
        """Return the widths of all kinds of feed-forwards that the model has, by key."""
        widths = {"ffn": self.ffn}
        if self._has_dense_ffn:
            widths["dense_ffn"] = self.dense_ffn
        if self.shared_experts:
            widths["shared_experts"] = self.shared_experts
        return widths

    def expert_flops(self) -> int:
        """Return the forward FLOPs of the routed experts of one layer that has experts, per
        token."""
        if not self.experts:
            return 0
        # Each weight is one product and one sum.
        return 2 * self.experts_per_token * self.hidden * self._mlp_matrices * self.ffn

    @property
    def gated(self) -> bool:
        """Return True if the feed-forward has a gate."""
        return ACTIVATIONS[self.mlp].gated

    @property
    def rotary_dims(self) -> int:
        """Return the number of features of each head that rotary positions turn."""
        return self.latent.rope_dim or int(self.head_dim * self.rotary_fraction)

    def initial_std(self, matrix: Matrix, layer: int = 0) -> float:
        """Return the standard deviation of the initial weights of a kind of matrix.

        layer: its number, from 0; not read for the embedding and the head.
        """
        branches = 1 if self.hybrid_pattern else 2
        std = self.init.std(matrix, self.init_std, self.layers, layer, branches)
        if matrix == "embedding":
            return std * self.mup.embedding
        if matrix == "head":
            return std * self.mup.readout
        return std * self.mup.hidden

    @property
    def mup(self) -> Mup:
        """Return the factors of muP, all 1 without it."""
        return Mup.of(self)

    @property
    def with_zero_weights(self) -> "ModelConfig":
        """Return this model with initial weights of zero, which take no time to draw, if their
        values do not matter."""
        # a copy is not validated: 0 is no value that a run file may give
        return self.model_copy(update={"init_std": 0.0, "init": InitialStd()})

    @property
    def _query_widths(self) -> int:
        # A gate of attention's output has as many features as the queries.
        return 2 if self.attention_gate else 1

    @property
    def _mlp_matrices(self) -> int:
        # Gate, up and down, or up and down.
        return 3 if self.gated else 2

    @property
    def _attention_weights(self) -> int:
        """Return the number of elements of all matrices of attention in a layer of this kind
        (`kind_of_layer`), or of what the layer has in its place; 0 if it has neither."""
        if not self.has_mixer:
            return 0
        if recurrence := self.delta_net or self.mamba:
            width = recurrence.projected_width + self.mixer_width
            return self.hidden * width + self.delta_net.up_weights
        if latent := self.latent:
            # With a query latent, queries are among the matrices up.
            query = 0 if latent.query_rank else self.hidden * self.heads * latent.head_dim
            output = self.hidden * self.heads * latent.value_dim
            return latent.width * self.hidden + latent.up_weights(self.heads) + query + output
        # in heads: of queries with their gate, keys and values, and of the output
        query_heads = self._query_widths * self.heads
        kv_heads = self.kv_heads if self.global_key_as_value else 2 * self.kv_heads
        output_heads = self.heads
        return self.hidden * self.head_dim * (query_heads + kv_heads + output_heads)

    def _mlp_weights(self, experts: int) -> int:
        """Return the number of elements of the matrices of the feed-forward, or in a layer with
        experts of the router, of `experts` experts, of the shared ones and of their gate."""
        if not self.has_feed_forward:
            return 0
        weights_of_feature = self.hidden * self._mlp_matrices
        if not self.experts:
            return weights_of_feature * self.ffn
        router = self.hidden * self.experts
        gate = self.hidden if self.shared_gate else 0
        return weights_of_feature * (experts * self.ffn + self.shared_experts) + router + gate

    def flops_per_token(self, seq_length: int) -> int:
        """Return the FLOPs of the matrix products of a forward pass, per token; training takes
        three times as many."""
        return self.over_layers(lambda kind: kind.layer_flops(seq_length)) + self.head_flops()

    def layer_flops(self, seq_length: int) -> int:
        """Return the forward FLOPs of the matrix products of one layer of this kind
        (`kind_of_layer`), per token.

        Attention counts the whole seq_length or window, as if it were not causal; of a layer with a
        recurrence its own FLOPs are counted (`attention_flops`).
        """
        # A token passes its own experts only. Each weight is one product and one sum.
        weights = self._attention_weights + self._mlp_weights(self.experts_per_token)
        return 2 * weights + self.attention_flops(seq_length)

    def attention_flops(self, seq_length: int) -> int:
        """Return the forward FLOPs, per token, of the products without weights of one layer of this
        kind (`kind_of_layer`): those of attention, of queries with keys and of weights with values,
        or those of the recurrence in its place.

        If only some layers have a window, this is the mean over the layers. Attention is counted as
        if it were not causal.
        """
        if not self.has_mixer:
            return 0
        if recurrence := self.delta_net or self.mamba:
            return recurrence.recurrent_flops
        # Without window_layers all layers have the window, if there is one.
        windowed_layers = len(self.window_layers) or self.layers
        full_layers = self.layers - windowed_layers
        window = min(seq_length, self.window or seq_length)
        # that one query is multiplied by, in all layers together
        keys = windowed_layers * window + full_layers * seq_length
        key_width = self.head_dim
        value_width = self.latent.value_dim or self.head_dim
        # each factor is one product and one sum
        flops_of_layers = 2 * keys * self.heads * (key_width + value_width)
        return flops_of_layers // self.layers

    def recomputed_attention_flops(self, seq_length: int) -> int:
        """Return the FLOPs, per token, of recomputing attention in one layer of this kind, without
        its projections but with those from latents."""
        return self.attention_flops(seq_length) + 2 * self.latent.up_weights(self.heads)

    def recomputed_layer_flops(self, seq_length: int) -> int:
        """Return the FLOPs, per token, of recomputing one whole layer of this kind in its backward
        pass.

        The last product of a layer, with experts that of the shared ones, is not recomputed,
        because no gradient needs its result, unless a norm, dropout, a gate or the layer's scalar
        is applied to it, or it is the product after attention.
        """
        flops = self.layer_flops(seq_length)
        drops_branches = self.dropout and self.dropout_at == "branches"
        has_multiplier = self.shared_gate or self.layer_scalar
        if drops_branches or self.norm_at != "before" or has_multiplier:
            return flops
        if not self.has_feed_forward:
            return flops
        last_width = self.shared_experts if self.experts else self.ffn
        last_product = 2 * self.hidden * last_width
        return flops - last_product

    def embedding_flops(self) -> int:
        """Return the FLOPs of the embedding, per token: its gradient adds one number per feature; a
        lookup is free."""
        return self.hidden

    def head_flops(self) -> int:
        """Return the forward FLOPs of the output head, per token."""
        return 2 * self.hidden * self.vocab


LayersByKind = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The numbers of the layers with a feed-forward in place of experts, of those with a gated delta
net, and of those with a window beside layers with other heads."""


def _kind_keys(
    layers_by_kind: LayersByKind,
    hybrid_pattern: str,
    layers: Iterable[int],
) -> list[tuple[bool, bool, bool, str]]:
    """Return `ModelConfig.kind_keys` of a model with these fields."""
    dense, delta, windowed = (frozenset(numbers) for numbers in layers_by_kind)
    letters = dict(enumerate(hybrid_pattern))
    return [
        (number in dense, number in delta, number in windowed, letters.get(number, ""))
        for number in layers
    ]


# a search for layouts counts the same layers for each
@lru_cache(maxsize=1024)
def _count_alike(
    layers_by_kind: LayersByKind,
    hybrid_pattern: str,
    layers: range | tuple[int, ...],
) -> Sequence[tuple[int, int]]:
    """Return, for each kind of layer, the number of one layer of it, the last of `layers`, and how
    many of `layers` are of this kind."""
    kinds = _kind_keys(layers_by_kind, hybrid_pattern, layers)
    example_of_kind = dict(zip(kinds, layers, strict=True))
    return [(example_of_kind[kind], count) for kind, count in Counter(kinds).items()]


def require_builtin(model: ModelConfig, what: str) -> None:
    """Raise UserError if the model is a custom one (`model.factory`). what: the feature that does
    not support it, in words."""
    if model.factory:
        raise UserError.of("model.factory_not_built_in", factory=model.factory, what=what)
