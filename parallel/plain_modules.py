"""Tensor parallelism for an existing torch module: parallel layers replace its linear layers, embeddings and norms.

    stage = parallelize(stage, context, {"*.up": "column", "*.down": "row", "embedding": "vocab"}, prefix="stage0.")

Each parameter is named by its path in the module, and each rank keeps its shard of the module's values. All ranks must
therefore build the module with the same values: call `torch.manual_seed` with one seed on all of them.

The styles are those of Megatron-LM (arXiv:1909.08053):

    column    nn.Linear: output features are sharded over tp; the next layer sees this rank's features
    row       nn.Linear: input features are sharded over tp; the output is summed over tp
    vocab     nn.Embedding: rows are sharded over tp
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole, layout_of
from megaprec.errors import UserError, did_you_mean
from megaprec.precision.marks import module_has_fp32_attr
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.norms import LayerNorm, RMSNorm

Style = Literal["column", "row", "vocab"]
NORMS = (nn.RMSNorm, nn.LayerNorm)
PLAIN = (nn.Linear, nn.Embedding, *NORMS)
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


def parallelize(module: nn.Module, context: Context, styles: Mapping[str, Style], prefix: str = "") -> nn.Module:
    """Replace layers of `module` in place by parallel layers with the same values, and return the module.

    styles: a style for each pattern of paths in the module ("*" matches any characters). Each nn.Linear and
        nn.Embedding must match a pattern; norms are always replaced. All other parameters are replicated on every rank.
    prefix: text before each path. Pipeline stages need different prefixes, because names are unique in the whole model.
    Activations are [sequence, batch, features] if `context.sequence` shards them.
    A frozen parameter stays frozen. Raises UserError, naming paths, for layers without a style, patterns that match no
    layer, and layers of which a parallel layer would lose something: tied parameters, a forward of their own, hooks,
    FP32 marks.
    """
    _require_kinds(module, context, styles, prefix)
    if _has_parallel_form(module):
        raise UserError(f"{type(module).__name__} cannot be replaced in place: wrap it, e.g. in nn.Sequential")
    modules = module.named_modules(remove_duplicate=False)
    found = {path: layer for path, layer in modules if _has_parallel_form(layer)}
    chosen = {path: _style_of(path, layer, styles) for path, layer in found.items()}
    problems = [f"{path}: {chosen[path]}" for path in found if chosen[path] not in ("column", "row", "vocab", "norm")]
    problems += [
        f'styles: "{pattern}" matches no layer{did_you_mean(pattern, found)}'
        for pattern in styles
        if not any(fnmatchcase(path, pattern) for path in found)
    ]
    problems += [*_tied(module, found), *_left_over(module, found, context)]
    if problems:
        raise UserError(*problems)
    for path, layer in found.items():
        module.set_submodule(path, _replacement(layer, chosen[path], context, prefix + path))
        layer.register_forward_pre_hook(partial(_refuse_old, path))
    attach_whole(module, context.tp, prefix)
    return module


def _refuse_old(path: str, *_: object) -> None:
    """Raise UserError for a layer that was replaced, but is reached past torch's modules: nothing would train it."""
    raise UserError(
        f"{path} was replaced by a parallel layer, but the old one is called, whose weights no optimizer has: forward "
        "must find the layer in the module, not in a list, a tuple or a variable of its own that was filled before "
        "parallelize; nn.ModuleList and nn.ModuleDict are up to date"
    )


def _require_kinds(module: object, context: object, styles: object, prefix: object) -> None:
    """Raise UserError for arguments of another kind, and for a module without values, of which ranks keep slices."""
    wrong = {
        f"module: must be a torch module, not a {type(module).__name__}": not isinstance(module, nn.Module),
        f"context = {context!r:.40}: must be a Context(plan, Axis.of(mesh, 'tp'))": not isinstance(context, Context),
        f"styles = {styles!r:.40}: must be a dict of patterns and styles, like {{'*.up': 'column'}}": not isinstance(
            styles, Mapping
        ),
        f"prefix = {prefix!r:.40}: must be text": not isinstance(prefix, str),
    }
    if problems := [line for line, broken in wrong.items() if broken]:
        raise UserError(*problems)
    assert isinstance(module, nn.Module)
    if empty := [name for name, p in module.named_parameters() if p.device.type == "meta" or nn.parameter.is_lazy(p)]:
        raise UserError(
            f"{empty[0]} has no values yet (meta or lazy), of which each rank would keep a slice: materialise and "
            "initialise the module before parallelize"
        )


def _has_parallel_form(layer: nn.Module) -> bool:
    return isinstance(layer, PLAIN)


def _style_of(path: str, layer: nn.Module, styles: Mapping[str, Style]) -> str:
    """Return the style of a layer, or a description of the problem with it."""
    if isinstance(layer, NORMS) and not _loss_in_replacing(layer):
        affine = layer.weight is not None and (isinstance(layer, nn.RMSNorm) or layer.bias is not None)
        ok = affine and len(layer.normalized_shape) == 1
        return "norm" if ok else "only norms over the last dim with all their parameters have a parallel form"
    if lost := _loss_in_replacing(layer):
        return lost
    style = next((style for pattern, style in styles.items() if fnmatchcase(path, pattern)), "")
    fits = ("vocab",) if isinstance(layer, nn.Embedding) else ("column", "row")
    if style not in fits:
        given = f"{style!r} is not a style of" if style else "no style is given to"
        return f"{given} {type(layer).__name__}: give it {' or '.join(map(repr, fits))}"
    return style


def _loss_in_replacing(layer: nn.Module) -> str:
    """Return what a parallel layer with the values of `layer` would lose; empty if it would lose nothing."""
    if type(layer) not in PLAIN:
        return f"{type(layer).__name__} is a subclass, whose own behaviour a parallel layer does not have"
    if others := {name for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        return f"the parameter {min(others)} has no parallel form"
    if any(getattr(layer, hooks, None) for hooks in HOOKS):
        return "hooks of a layer would be lost: register them after parallelize"
    if any(getattr(one, hooks, None) for one in layer.parameters() for hooks in HOOKS):
        return "hooks of its parameters would be lost, and a parallel layer calls none with gradients: remove them"
    if module_has_fp32_attr(layer):
        return "the FP32 mark would be lost: mark the layer after parallelize"
    given = [name for name in ("padding_idx", "max_norm") if getattr(layer, name, None) is not None]
    given += [name for name in ("sparse", "scale_grad_by_freq") if getattr(layer, name, False)]
    return f"{given[0]} of an embedding has no parallel form" if given else ""


def _tied(module: nn.Module, found: Mapping[str, nn.Module]) -> list[str]:
    """Return a line for each parameter of the layers to be replaced that has several paths."""
    own = {id(parameter) for layer in found.values() for parameter in layer.parameters()}
    paths: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return [
        f"{' and '.join(same)} are one parameter, and parallel layers would have one each: untie them, or build the "
        "module from parallel layers"
        for key, same in paths.items()
        if key in own and len(same) > 1
    ]


def _left_over(module: nn.Module, found: Mapping[str, nn.Module], context: Context) -> list[str]:
    """Return the problems of the parameters that no parallel layer replaces."""
    plan = context.plan
    taken = {id(parameter) for layer in found.values() for parameter in layer.parameters()}
    rest = [name for name, parameter in module.named_parameters() if id(parameter) not in taken]
    if rest and context.cut_sequence:
        return [f"{rest[0]}: under sequence parallelism a parameter outside parallel layers would miss its all-reduce"]
    if rest and plan.compute != plan.parameters:
        return [f"{rest[0]}: a plan that computes in another dtype than that of parameters needs parallel layers only"]
    return []


def _replacement(layer: nn.Module, style: str, context: Context, name: str) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        new: nn.Module = VocabParallelEmbedding(context, layer.num_embeddings, layer.embedding_dim, name=name)
    elif isinstance(layer, nn.Linear):
        kind = ColumnParallelLinear if style == "column" else RowParallelLinear
        new = kind(context, layer.in_features, layer.out_features, name=name, bias=layer.bias is not None)
    elif isinstance(layer, nn.RMSNorm):
        eps = torch.finfo(layer.weight.dtype).eps if layer.eps is None else layer.eps
        new = RMSNorm(context, layer.normalized_shape[0], name=name, eps=eps)
    else:
        assert isinstance(layer, nn.LayerNorm)
        new = LayerNorm(context, layer.normalized_shape[0], name=name, eps=layer.eps)
    for own, parameter in new.named_parameters():
        _copy_slice(parameter, layer.get_parameter(own))
        parameter.requires_grad_(layer.get_parameter(own).requires_grad)
    return new


@torch.no_grad()
def _copy_slice(parameter: nn.Parameter, whole: Tensor) -> None:
    part = layout_of(parameter).parts[0]
    parameter[tuple(slice(length) for length in part.local)].copy_(part.take(whole))
