"""The distribution of initial weights: normal, with a standard deviation for each kind of matrix.

`model.init_std` applies to all kinds unless `model.init` sets another value. Matrices that write
into the residual stream start smaller, so that the stream does not grow with depth: scaled by the
number of layers as in GPT-2, or by the depth of the layer itself. Biases start at zero, norm
weights at one.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Matrix = Literal["embedding", "head", "qkv", "output", "up", "down"]


class InitialStd(BaseModel):
    """Standard deviations of initial weights by kind of matrix. Raises pydantic's ValidationError
    (a ValueError)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    embedding: float = Field(default=0.0, ge=0, description="of the embedding; 0: init_std")
    head: float = Field(default=0.0, ge=0, description="of an output head of its own; 0: init_std")
    qkv: float = Field(default=0.0, ge=0, description="of query, key and value; 0: init_std")
    output: float = Field(
        default=0.0, ge=0, description="of attention's output, before `shrink`; 0: init_std"
    )
    up: float = Field(
        default=0.0, ge=0, description="of the feed-forward's first matrices; 0: init_std"
    )
    down: float = Field(
        default=0.0, ge=0, description="of its last one, before `shrink`; 0: init_std"
    )
    shrink: Literal["model", "layer", "none"] = Field(
        default="model",
        description=(
            "what `output` and `down` are divided by: the root of twice the number of layers "
            "(model), of twice the layer's own number counted from 1 (layer), or nothing"
        ),
    )

    def std(
        self,
        matrix: Matrix,
        usual: float,
        layers: int,
        layer: int,
        branches: int = 2,
    ) -> float:
        """Return the standard deviation of the initial weights of a matrix.

        usual: that of matrices without a value of their own (`init_std`).
        layers: the number of layers of the model.
        layer: the number of the matrix's layer, from 0.
        branches: how many results a layer adds to the residual stream: those of attention and of
            the feed-forward are two.
        """
        std: float = getattr(self, matrix) or usual
        adds_to_stream = matrix in ("output", "down")
        if not adds_to_stream or self.shrink == "none":
            return std
        # Variances of what is added to the residual stream add up: they are divided by the number
        # of additions in the whole model, or up to this layer.
        depth = layers if self.shrink == "model" else layer + 1
        return std / (branches * depth) ** 0.5
