"""A model of transformers with given weights, whose weights and gradients are read by logical name.

Both ways lead through folders that transformers itself reads and writes.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from models.config import ModelConfig
from models.feed_forward.router import is_correction
from tools.convert.core.source import Facts, Origin, Source
from tools.convert.core.target import convert
from tools.convert.hf.config import model_type_of
from tools.convert.hf.folder import open_hf
from tools.convert.hf.write import hf_target
from tools.convert.probe import float32_is_float64
from tools.convert.transformers_package import if_untested, quiet_transformers, why_missing
from tools.verify.oracle.batch import OracleBatch
from tools.verify.oracle.model import Tensors

MOST_REASON = 300  # characters of an error of transformers that are shown
CORRECTION = "e_score_correction_bias"  # a buffer of a router


class TransformersModel:
    """A model of transformers in one dtype.

    config: of the same model in megaprec.
    weights: by logical name; of the same dtype.
    name: of its class, and the version of the package.
    """

    def __init__(self, config: ModelConfig, weights: Tensors) -> None:
        self.config = config
        self.dtype = next(iter(weights.values())).dtype
        with self.computing() as transformers:
            self.module = _load(transformers, config, weights)
            self.name = f"transformers {transformers.__version__}, {type(self.module).__name__}"
        # how many tokens each expert was given, by the name of the module with the correction
        self.loads: Tensors = {}
        for name, module in self.module.named_modules():
            if isinstance(getattr(module, CORRECTION, None), Tensor):
                # MiniMax's is one of the layer with experts, whose router is given it
                router = getattr(module, "gate", module)
                experts = len(getattr(module, CORRECTION))
                router.register_forward_hook(self._count_for(name, experts))

    @contextmanager
    def computing(self) -> Iterator[Any]:
        """Context manager that gives transformers, which within it computes all in float64 if that
        is the model's dtype. Raises UserError if it is missing."""
        try:
            with quiet_transformers() as transformers, self._widened(transformers):
                yield transformers
        except ImportError as problem:
            raise UserError.of(
                "parity.oracle_transformers", why_missing=why_missing(problem)
            ) from problem

    def _widened(self, transformers: Any) -> AbstractContextManager[None]:
        """Return a context in which transformers rounds nothing to FP32 that is wider."""
        if self.dtype != torch.float64:
            return nullcontext()
        return float32_is_float64(transformers, model_type_of(self.config))

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits [b, s, vocab]. tokens, positions: int64 [b, s]."""
        # a mask says that a sample is one document, whatever its positions are
        everything = torch.ones_like(tokens)
        outputs = self.module(
            tokens, attention_mask=everything, position_ids=positions, use_cache=False
        )
        return outputs.logits

    def further_loss(self, batch: OracleBatch) -> Tensor:
        """Return 0: transformers' losses of routers are left out."""
        return torch.zeros((), dtype=self.dtype)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return all parameters."""
        return self.module.parameters()

    def parameters_by_factors(
        self, factors: Mapping[str, tuple[float, float]]
    ) -> dict[tuple[float, float], list[nn.Parameter]]:
        """Return the parameters that share factors of learning rate and weight decay.

        factors: by logical name. Raises UserError if a parameter consists of logical tensors of
        different factors.
        """
        kinds = sorted(set(factors.values()))
        # A model like this one, in which each element is the number of its pair of factors, shows
        # the factors of the logical tensors that each parameter consists of.
        numbers: Tensors = {}
        for name, values in self.weights().items():
            number = 0.0 if is_correction(name) else float(kinds.index(factors[name]))
            numbers[name] = torch.full_like(values, number)
        with self.computing() as transformers:
            marked = _load(transformers, self.config, numbers)
        sharing: dict[tuple[float, float], list[nn.Parameter]] = {}
        pairs = zip(marked.parameters(), self.module.named_parameters(), strict=True)
        for marks, (name, parameter) in pairs:
            lowest, highest = (int(mark) for mark in marks.detach().aminmax())
            if lowest != highest:
                raise UserError.of("parity.oracle_groups", name=name)
            sharing.setdefault(kinds[lowest], []).append(parameter)
        return sharing

    def weights(self) -> Tensors:
        """Return the weights by logical name, in the dtype of the model."""
        return self._read_saved({})

    def gradients(self) -> Tensors:
        """Return the gradients by logical name; those of corrections of routers are the tokens that
        their experts were given."""
        gradients: Tensors = {}
        for name, parameter in self.module.named_parameters():
            empty = torch.zeros_like(parameter)
            gradients[name] = empty if parameter.grad is None else parameter.grad
        for name, counts in self.loads.items():
            gradients[f"{name}.{CORRECTION}"] = counts
        return self._read_saved(gradients)

    def moments(self, optimizer: torch.optim.Optimizer, kind: str) -> Tensors:
        """Return what an optimizer keeps of each parameter under the name `kind`, by logical
        name."""
        kept: Tensors = {}
        for name, parameter in self.module.named_parameters():
            kept[name] = optimizer.state[parameter][kind]
        return self._read_saved(kept)

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Move the corrections of routers towards experts that were given fewer tokens than the
        others, and forget who was given what. speed: by which they move."""
        for name, counts in self.loads.items():
            correction = getattr(self.module.get_submodule(name), CORRECTION)
            correction += speed * (counts.mean() - counts).sign()
        self.loads.clear()

    def _count_for(self, name: str, experts: int) -> Any:
        """Return a forward hook of a router that adds to `loads[name]` how many tokens each expert
        was given."""

        def count(router: nn.Module, arguments: Any, outputs: Any) -> None:
            *_, chosen = outputs  # transformers' routers return the chosen experts last
            counts = torch.bincount(chosen.flatten(), minlength=experts).to(self.dtype)
            self.loads[name] = self.loads.get(name, 0) + counts

        return count

    @torch.no_grad()
    def _read_saved(self, replaced: Mapping[str, Tensor]) -> Tensors:
        """Return what transformers saves, by logical name. replaced: by name of a parameter or a
        buffer, what is saved in its place."""
        stored = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        kept = {name: stored[name].clone() for name in replaced}
        for name, values in replaced.items():
            stored[name].copy_(values)
        try:
            return self._saved_tensors()
        finally:
            for name, values in kept.items():
                stored[name].copy_(values)

    def _saved_tensors(self) -> Tensors:
        """Return what transformers saves, by logical name."""
        tensors: Tensors = {}
        with scratch_folder("oracle") as folder, self.computing():
            saving: Any = self.module
            saving.save_pretrained(folder)
            source = open_hf(Path(folder))
            for key in source.keys("weight"):
                tensors[key.removeprefix("weight/")] = source.read(key).to(self.dtype)
        return tensors


def _load(transformers: Any, config: ModelConfig, weights: Tensors) -> nn.Module:
    """Return the model that transformers loads from a folder with these weights."""
    source = source_of(config, weights)
    dtype = next(iter(weights.values())).dtype
    with scratch_folder("oracle") as temporary:
        folder = Path(temporary) / "model"
        convert(source, hf_target(source, None), folder, lambda written, what: None)
        return _load_folder(transformers, folder, dtype)


def _load_folder(transformers: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model that transformers loads. Raises UserError if it cannot, whatever the
    reason."""
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        # torch's grouped products know only widths of 16 bytes
        settings._experts_implementation = "eager"
        # a class may have one by default, whose embedding would get no gradient
        settings.pad_token_id = None
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
        )
    except Exception as error:  # a library that reads the files of others has many kinds
        reason = " ".join(str(error).split())[:MOST_REASON]
        raise UserError.of(
            "parity.oracle_not_loaded",
            kind=type(error).__name__,
            reason=reason,
            if_untested=if_untested(),
        ) from error
    module.train()
    return module


def source_of(config: ModelConfig, weights: Tensors) -> Source:
    """Return a model in memory as `convert` reads it."""
    origins: list[Origin] = []
    for name, values in weights.items():
        origin = Origin(
            name=name,
            keys=(f"weight/{name}",),
            shapes=(tuple(values.shape),),
            dtype=values.dtype,
            load=lambda values=values: [values],
            rows=lambda top, bottom, values=values: values[top:bottom],
        )
        origins.append(origin)
    return Source(Path("weights in memory"), "memory", config, origins, Facts(), ())
