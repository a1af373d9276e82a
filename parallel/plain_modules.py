"""Tensor parallelism for an existing torch module: parallel layers replace its linear layers,
embeddings and norms.

    stage = parallelize(stage, context, {"*.up": "column", "*.down": "row", "embedding": "vocab"},
    prefix="stage0.")

Each parameter is named by its path in the module, and each rank keeps its shard of the module's
values. All ranks must therefore build the module with the same values: call `torch.manual_seed`
with one seed on all of them.

The styles are those of Megatron-LM (arXiv:1909.08053):

    column    nn.Linear: output features are sharded over tp; the next layer sees this rank's features
    row       nn.Linear: input features are sharded over tp; the output is summed over tp
    vocab     nn.Embedding: rows are sharded over tp
    heads     a norm over the features of one head, between layers of style column and row
    whole     nn.Linear, nn.Embedding: torch's own layer stays as it is, on each rank

Code between layers of style column and row computes with slices of the features. On several
tensor-parallel ranks it is followed in passes number 1, 2, 4, 8 and so on, and what would compute
something else than on one process is refused by name (`parallel.cut_features`).
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole, layout_of
from megaprec.errors import UserError, did_you_mean
from megaprec.precision.marks import module_has_fp32_attr
from megaprec.precision.nested import tensors
from parallel.context import Context
from parallel.cut_features import CutTensor
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.norms import LayerNorm, RMSNorm
from parallel.plain_layers import (
    Column,
    Dropout,
    Row,
    Vocab,
    Watch,
    WatchedLayerNorm,
    WatchedRMSNorm,
)

Style = Literal["column", "row", "vocab", "heads", "whole"]
NORMS = (nn.RMSNorm, nn.LayerNorm)
PLAIN = (nn.Linear, nn.Embedding, *NORMS)
CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Modules of torch that may contain layers that were replaced."""
CUT = ("column", "row", "vocab", "norm", "heads")
PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
SLICED_DIM = {
    ("column", "weight"): 0,
    ("column", "bias"): 0,
    ("vocab", "weight"): 0,
    ("row", "weight"): 1,
}
"""The dimension along which a parameter of a layer of a style is sharded; other parameters are whole."""
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


def parallelize(
    module: nn.Module, context: Context, styles: Mapping[str, Style], prefix: str = ""
) -> nn.Module:
    """Replace layers of `module` in place by parallel layers with the same values, and return the
    module.

    styles: a style for each pattern of paths in the module ("*" matches any characters). Each
        nn.Linear and nn.Embedding must match a pattern; norms are always replaced, and each
        nn.Dropout by one that drops the same elements for every number of tensor-parallel ranks.
        All other parameters are replicated on every rank, as are those of nn.MultiheadAttention.
    prefix: text before each path. Pipeline stages need different prefixes, because names are unique
    in the whole model. Activations are [sequence, batch, features] if `context.sequence` shards
    them. A frozen parameter stays frozen, and parameters that are cut alike stay tied. Raises
    UserError, naming paths, for layers without a style, patterns that match no layer, sizes that do
    not divide by tp, and layers of which a parallel layer would lose something: a forward of their
    own, hooks, FP32 marks. On several tensor-parallel ranks, forward passes raise UserError for
    operations on slices of features that one process would compute from all of them, and for inputs
    that differ between these ranks.
    """
    _require_kinds(module, context, styles, prefix)
    if _has_parallel_form(module):
        raise UserError(
            f"{type(module).__name__} cannot be replaced in place: wrap it, e.g. in nn.Sequential"
        )
    layers = dict(_layers(module))
    chosen = {path: _style_of(path, layer, styles) for path, layer in layers.items()}
    problems = [
        f"{path}: {style}" for path, style in chosen.items() if style not in (*CUT, "whole")
    ]
    problems += [
        _not_matched(pattern, module, layers) for pattern in styles if not _matches(pattern, layers)
    ]
    problems += _undivided(layers, chosen, context)
    cut = {path: layer for path, layer in layers.items() if chosen[path] != "whole"}
    problems += [*_tied(module, cut, chosen, context), *_left_over(module, cut, context)]
    if problems:
        raise UserError(*problems)
    watch = Watch(context)
    shared = _shared(module)
    made: dict[int, nn.Module] = {}
    for path, layer in cut.items():
        if id(layer) not in made:
            made[id(layer)] = _replacement(layer, chosen[path], context, prefix + path, watch)
            layer.register_forward_pre_hook(partial(_refuse_old, path))
        module.set_submodule(path, made[id(layer)])
    _tie(module, shared, cut)
    _replace_dropouts(module, prefix, watch)
    if context.tp.size > 1:
        _watch(module, watch)
    attach_whole(module, context.tp, prefix)
    return module


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have a parallel form, by each of their paths.

    Those within nn.MultiheadAttention are not among them: it computes with their weights itself.
    """
    modules = list(module.named_modules(remove_duplicate=False))
    whole = tuple(f"{path}." for path, one in modules if isinstance(one, nn.MultiheadAttention))
    for path, layer in modules:
        if _has_parallel_form(layer) and not path.startswith(whole):
            yield path, layer


def _matches(pattern: str, layers: Mapping[str, nn.Module]) -> bool:
    return any(fnmatchcase(path, pattern) for path in layers)


def _not_matched(pattern: str, module: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """Return the line about a pattern that matches no layer."""
    for path, other in module.named_modules():
        if fnmatchcase(path, pattern) and isinstance(other, PARALLEL):
            return (
                f'styles: "{pattern}" matches {path}, which is a parallel layer already: call '
                "parallelize once, with "
                "the styles of all layers"
            )
        if path and fnmatchcase(path, pattern) and next(other.parameters(), None) is not None:
            kind = type(other).__name__
            # of transformers' GPT-2: its weight is that of nn.Linear, transposed
            transposed = kind == "Conv1D"
            if transposed:
                remedy = f"replace it by an nn.Linear of {path}.weight.T, or leave"
            else:
                remedy = "leave"
            return (
                f'styles: "{pattern}" matches {path}, a {kind}, and only nn.Linear and '
                "nn.Embedding can be cut: "
                f"{remedy} the pattern out, and each rank has it whole"
            )
    return f'styles: "{pattern}" matches no layer{did_you_mean(pattern, layers)}'


def _undivided(
    layers: Mapping[str, nn.Module], chosen: Mapping[str, str], context: Context
) -> Iterator[str]:
    """Yield a line for each linear layer whose features do not divide by the number of
    tensor-parallel ranks."""
    for path, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            continue
        sizes = {"column": (layer.out_features, "output"), "row": (layer.in_features, "input")}
        size, kind = sizes.get(chosen[path], (0, ""))
        if size % context.tp.size:
            yield (
                f"{path}: {size} {kind} features do not divide by tensor = {context.tp.size}: "
                "give it the style "
                '"whole", or a size that divides'
            )


def _replace_dropouts(module: nn.Module, prefix: str, watch: Watch) -> None:
    """Replace each nn.Dropout, but those that nn.MultiheadAttention and recurrent layers do not
    call."""
    made: dict[int, Dropout] = {}
    for path, old in list(module.named_modules(remove_duplicate=False)):
        if type(old) is nn.Dropout and path:
            made.setdefault(id(old), Dropout(old, prefix + path, watch))
            module.set_submodule(path, made[id(old)])


def _watch(module: nn.Module, watch: Watch) -> None:
    """Begin and end the passes of `watch` with calls of the module, and refuse whole layers that
    are given slices."""
    module.register_forward_pre_hook(watch.begin)
    module.register_forward_hook(watch.end, always_call=True)
    for path, other in module.named_modules():
        if isinstance(other, nn.TransformerEncoderLayer):
            other.activation_relu_or_gelu = (
                0  # its evaluation would compute with the slices of weights by itself
            )
        if isinstance(other, nn.TransformerEncoder):
            other.use_nested_tensor = False
        container = isinstance(other, CONTAINERS)
        passes = container or isinstance(other, nn.Identity)
        if path and type(other).__module__.startswith("torch.nn.modules") and not passes:
            other.register_forward_pre_hook(partial(_note_slices, path), with_kwargs=True)


def _note_slices(
    path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note in slices that torch's own module is given them; raise UserError if it has parameters or
    buffers."""
    whole = any(True for _ in (*module.parameters(), *module.buffers()))
    for x in tensors((args, kwargs)):
        if not isinstance(x, CutTensor):
            continue
        x.given_to = path  # type: ignore[attr-defined]
        if whole:
            raise UserError(
                f"{path} is a {type(module).__name__} that each rank has whole, but it is "
                "given a slice of the "
                f"{x.cut.source}: give the layers of style column and row before and after it "
                'the style "whole", or '
                "put it elsewhere"
            )


def _refuse_old(path: str, *_: object) -> None:
    """Raise UserError for a layer that was replaced, but is reached past torch's modules: nothing
    would train it."""
    raise UserError(
        f"{path} was replaced by a parallel layer, but the old one is called, whose weights "
        "no optimizer has: forward "
        "must find the layer in the module, not in a list, a tuple or a variable of its own "
        "that was filled before "
        "parallelize; nn.ModuleList and nn.ModuleDict are up to date"
    )


def _require_kinds(module: object, context: object, styles: object, prefix: object) -> None:
    """Raise UserError for arguments of another kind, and for a module without values, of which
    ranks keep slices."""
    wrong = {
        f"module: must be a torch module, not a {type(module).__name__}": not isinstance(
            module, nn.Module
        ),
        f"context = {context!r:.40}: must be a Context(plan, Axis.of(mesh, 'tp'))": not isinstance(
            context, Context
        ),
        (
            f"styles = {styles!r:.40}: must be a dict of patterns and styles, like {{'*.up': "
            f"'column'}}"
        ): not isinstance(styles, Mapping),
        f"prefix = {prefix!r:.40}: must be text": not isinstance(prefix, str),
    }
    if problems := [line for line, broken in wrong.items() if broken]:
        raise UserError(*problems)
    assert isinstance(module, nn.Module)
    if empty := [
        name
        for name, p in module.named_parameters()
        if p.device.type == "meta" or nn.parameter.is_lazy(p)
    ]:
        raise UserError(
            f"{empty[0]} has no values yet (meta or lazy), of which each rank would keep a "
            "slice: materialise and "
            "initialise the module before parallelize"
        )


def _has_parallel_form(layer: nn.Module) -> bool:
    return isinstance(layer, PLAIN)


def _style_of(path: str, layer: nn.Module, styles: Mapping[str, Style]) -> str:
    """Return the style of a layer, or a description of the problem with it."""
    style = next((style for pattern, style in styles.items() if fnmatchcase(path, pattern)), "")
    if isinstance(layer, NORMS):
        return _style_of_norm(layer, style)
    if style == "whole":
        return style
    if lost := _loss_in_replacing(layer):
        return lost
    fits = ("vocab", "whole") if isinstance(layer, nn.Embedding) else ("column", "row", "whole")
    if style not in fits:
        given = f"{style!r} is not a style of" if style else "no style is given to"
        return f"{given} {type(layer).__name__}: give it {' or '.join(map(repr, fits))}"
    return style


def _style_of_norm(layer: nn.Module, style: str) -> str:
    """Return "norm", or "heads", if a parallel layer replaces the norm, else "whole"; or a
    description of a problem."""
    assert isinstance(layer, NORMS)
    affine = layer.weight is not None and (isinstance(layer, nn.RMSNorm) or layer.bias is not None)
    replaced = affine and len(layer.normalized_shape) == 1 and type(layer) in NORMS
    if style == "heads" and not replaced:
        return (
            "only an nn.RMSNorm or nn.LayerNorm over one dimension, with all its parameters, can "
            'have the style "heads"'
        )
    if not replaced or (style == "whole" and _loss_in_replacing(layer)):
        return "whole"
    return _loss_in_replacing(layer) or ("heads" if style == "heads" else "norm")


def _loss_in_replacing(layer: nn.Module) -> str:
    """Return what a parallel layer with the values of `layer` would lose; empty if it would lose
    nothing."""
    keep = 'or give it the style "whole"'
    if type(layer) not in PLAIN:
        kind = type(layer).__name__
        return (
            f"{kind} is a subclass, whose own behaviour a parallel layer does not have: use "
            f"torch's, {keep}"
        )
    if others := {name for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        return f"the parameter {min(others)} has no parallel form: remove it, {keep}"
    if any(getattr(layer, hooks, None) for hooks in HOOKS):
        return f"hooks of a layer would be lost: register them after parallelize, {keep}"
    if any(getattr(one, hooks, None) for one in layer.parameters() for hooks in HOOKS):
        return (
            "hooks of its parameters would be lost, and a parallel layer calls none with "
            "gradients: remove them, "
            f"{keep}"
        )
    if module_has_fp32_attr(layer):
        return "the FP32 mark would be lost: mark the layer after parallelize"
    given = [name for name in ("padding_idx", "max_norm") if getattr(layer, name, None) is not None]
    given += [name for name in ("sparse", "scale_grad_by_freq") if getattr(layer, name, False)]
    if given:
        return f"{given[0]} of an embedding has no parallel form: leave it out, {keep}"
    return ""


def _shared(module: nn.Module) -> list[list[str]]:
    """Return the paths of each parameter that has several."""
    paths: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return [same for same in paths.values() if len(same) > 1]


def _tied(
    module: nn.Module, cut: Mapping[str, nn.Module], chosen: Mapping[str, str], context: Context
) -> Iterator[str]:
    """Yield a line for each parameter with several paths of which not all would be the same
    slice."""
    for same in _shared(module):
        holders = [path.rpartition(".") for path in same]
        if not any(path in cut for path, _, _ in holders):
            continue
        slices = {
            SLICED_DIM.get((chosen[path], name)) if path in cut else "by code that is not cut"
            for path, _, name in holders
        }
        if len(slices) > 1 or (
            context.plan.fp8 and len({id(cut[path]) for path, _, _ in holders}) > 1
        ):
            yield (
                f"{' and '.join(same)} are one parameter, and these styles would cut it in "
                "different ways: give both "
                'layers the style "whole", give an embedding "vocab" and a head "column", or '
                "untie them"
            )


def _tie(module: nn.Module, shared: list[list[str]], cut: Mapping[str, nn.Module]) -> None:
    """Make parameters that were one parameter one again, after their layers have been replaced."""
    for same in shared:
        first, *others = same
        if first.rpartition(".")[0] not in cut:
            continue
        parameter = module.get_parameter(first)
        for other in others:
            path, _, name = other.rpartition(".")
            setattr(module.get_submodule(path), name, parameter)


def _left_over(module: nn.Module, cut: Mapping[str, nn.Module], context: Context) -> list[str]:
    """Return the problems of the parameters that no parallel layer replaces."""
    plan = context.plan
    taken = {id(parameter) for layer in cut.values() for parameter in layer.parameters()}
    rest = [name for name, parameter in module.named_parameters() if id(parameter) not in taken]
    if rest and context.cut_sequence:
        return [
            (
                f"{rest[0]}: under sequence parallelism a parameter outside parallel layers would "
                "miss its all-reduce"
            )
        ]
    if rest and plan.compute != plan.parameters:
        return [
            (
                f"{rest[0]}: a plan that computes in another dtype than that of parameters needs "
                "parallel layers only"
            )
        ]
    return []


def _replacement(
    layer: nn.Module, style: str, context: Context, name: str, watch: Watch
) -> nn.Module:
    """Return the parallel layer of a style with this rank's slice of the values of `layer`."""
    watches = context.tp.size > 1
    heads = style == "heads"
    new: Any
    if isinstance(layer, nn.Embedding):
        embedding = Vocab if watches else VocabParallelEmbedding
        new = embedding(context, layer.num_embeddings, layer.embedding_dim, name=name)
    elif isinstance(layer, nn.Linear):
        column = Column if watches else ColumnParallelLinear
        row = Row if watches else RowParallelLinear
        kind = column if style == "column" else row
        new = kind(
            context, layer.in_features, layer.out_features, name=name, bias=layer.bias is not None
        )
    elif isinstance(layer, nn.RMSNorm):
        eps = torch.finfo(layer.weight.dtype).eps if layer.eps is None else layer.eps
        rms_norm = WatchedRMSNorm if watches else RMSNorm
        new = rms_norm(context, layer.normalized_shape[0], name=name, eps=eps, own=heads)
    else:
        assert isinstance(layer, nn.LayerNorm)
        layer_norm = WatchedLayerNorm if watches else LayerNorm
        new = layer_norm(context, layer.normalized_shape[0], name=name, eps=layer.eps, own=heads)
    if watches:
        new.watch = watch
        new.path = name
        new.of_heads = heads
    for path, parameter in new.named_parameters():
        _copy_slice(parameter, layer.get_parameter(path))
        parameter.requires_grad_(layer.get_parameter(path).requires_grad)
    return new


@torch.no_grad()
def _copy_slice(parameter: nn.Parameter, whole: Tensor) -> None:
    part = layout_of(parameter).parts[0]
    parameter[tuple(slice(length) for length in part.local)].copy_(part.take(whole))
