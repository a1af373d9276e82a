"""Maximal update parametrization (muP) as facts of a model: factors of initial weights and of
gradients, and the growth of each logical tensor, from which the optimizer has its factors.

With m = hidden / mup_base_hidden, the published rules ("Tensor Programs V", arXiv 2203.03466, table
8) multiply the result of the output head by 1 / m. Here nothing is multiplied in the forward pass,
so that exported weights are those of a usual model. By the symmetry of table 3 a multiplier c
behind a weight is the same as an initial weight, a learning rate and a gradient (for clipping and
Adam's epsilon) that are c times as large, and a weight decay that is divided by c. So c moves into

    head, router, gate of shared experts     1 / m into the weight itself
    a tied head                              1 / m into the final norm before it, since the weight
                                             is the embedding's
    an embedding that is multiplied by the   1 / sqrt(m) into the embedding, so that what is looked
    root of hidden (Gemma)                   up does not grow; a tied head gets it back

The optimizer's part is `megaprec.optim.rules.width`. docs/mup.md has the table.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from megaprec.comm.layout import AS_BASE, Growth, Part, attach, layout_of
from models.model_fields import ModelFields

READOUTS = ("head.weight", "router.weight", "shared_gate.weight")
"""Ends of the names of matrices from hidden features to numbers whose count does not grow."""
FINAL_NORM = "final_norm."


@dataclass(frozen=True)
class Mup:
    """Factors of initial weights by kind of tensor, beside the values of the base model.

    growth: how many times as wide as the base model the model is. The factors of matrices, `hidden`
        and `readout`, are made of it.
    embedding: of the embedding, and of its gradient.
    final_norm: of the final norm, whose own weight is 1 otherwise.
    head_gradient: of the gradient that the output head gives its weight.
    """

    growth: float = 1.0
    embedding: float = 1.0
    final_norm: float = 1.0
    head_gradient: float = 1.0

    @classmethod
    def of(cls, model: ModelFields) -> "Mup":
        """Return the factors of a model, all 1 without muP."""
        if not model.mup_base_hidden:
            return cls()
        growth = model.hidden / model.mup_base_hidden
        # Gemma multiplies embeddings by the root of hidden, which grows; any other factor is the
        # same at all widths.
        scale_grows = model.embedding_scale == model.hidden**0.5
        embedding = growth**-0.5 if scale_grows else 1.0
        if not model.tied:
            return cls(growth, embedding, head_gradient=1.0 / growth)
        # A tied head multiplies by the embedding, which has its factor already: the norm has the
        # rest of 1 / growth.
        return cls(
            growth, embedding, final_norm=1.0 / (growth * embedding), head_gradient=embedding
        )

    @property
    def hidden(self) -> float:
        """Return the factor of matrices between hidden features: they sum over more inputs."""
        return self.growth**-0.5

    @property
    def readout(self) -> float:
        """Return the factor of matrices from hidden features to a few numbers, and of their
        gradients."""
        return 1.0 / self.growth

    def growth_of(self, part: Part) -> Growth:
        """Return the growth of a logical tensor over that of the base model, from its name and its
        number of dims."""
        name = part.name
        # a lookup sums over no inputs that grow
        if name == "embedding.weight":
            return Growth(outputs=self.growth, scale=self.embedding)
        if name == "positions.weight":
            return Growth(outputs=self.growth)
        if name.startswith(FINAL_NORM):
            return Growth(scale=self.final_norm)
        # other norms, biases and sinks have the base model's rates
        if len(part.shape) < 2:
            return AS_BASE
        if name.endswith(READOUTS):
            return Growth(inputs=self.growth)
        return Growth(inputs=self.growth, outputs=self.growth)


def note_growth(parameters: Iterable[nn.Parameter], mup: Mup) -> None:
    """Write into the layouts of parameters how their tensors grow, where the optimizer reads it."""
    if mup == Mup():
        return
    for parameter in parameters:
        layout = layout_of(parameter)
        parts = tuple(replace(part, growth=mup.growth_of(part)) for part in layout.parts)
        attach(parameter, replace(layout, parts=parts))


def scaled_widths(model: ModelFields) -> dict[str, int]:
    """Return the numbers of features that grow with hidden under muP, by key of the model: all that
    some matrix sums over."""
    widths = {"ffn": model.ffn}
    if model.dense_layers:
        widths["dense_ffn"] = model.dense_ffn
    if model.shared_experts:
        widths["shared_experts"] = model.shared_experts
    latent = model.latent
    if not latent:
        return widths | {"heads x head_dim": model.heads * model.head_dim}
    if latent.query_rank:
        widths["latent.query_rank"] = latent.query_rank
    widths["latent.kv_rank"] = latent.kv_rank
    return widths | {"heads x latent.value_dim": model.heads * latent.value_dim}
