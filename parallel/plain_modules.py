"""Tensor parallelism for an existing torch module: parallel layers replace its linear layers,
embeddings and norms.

    stage = parallelize(stage, context, {"*.up": "column", "*.down": "row", "embedding": "vocab"},
    prefix="stage0.")

Each parameter is named by its path in the module, and each rank keeps its shard of the module's
values. All ranks must therefore build the module with the same values: call `torch.manual_seed`
with one seed on all of them.

The styles are those of Megatron-LM (arXiv:1909.08053):

    column    nn.Linear: output features are sharded over tp; the next layer sees this rank's
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
from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.precision.marks import module_has_fp32_attr
from megaprec.precision.nested import tensors
from megaprec.torch_private import has_any_hook
from parallel.context import Context
from parallel.cut_features import CutTensor
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.norms import LayerNorm, RMSNorm
from parallel.plain_layers import (
    CheckedPasses,
    Column,
    Dropout,
    Row,
    Vocab,
    Watched,
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
# what a layer may be replaced by, and "whole", which leaves it as it is
STYLES = ("column", "row", "vocab", "norm", "heads", "whole")
PARALLEL_LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
SLICED_DIM = {
    ("column", "weight"): 0,
    ("column", "bias"): 0,
    ("vocab", "weight"): 0,
    ("row", "weight"): 1,
}
"""The dim along which a parameter of a layer of a style is sharded; others are replicated."""
# options of nn.Embedding that a parallel layer does not have, and their defaults
EMBEDDING_OPTIONS = {
    "padding_idx": None,
    "max_norm": None,
    "sparse": False,
    "scale_grad_by_freq": False,
}


def parallelize(
    module: nn.Module,
    context: Context,
    styles: Mapping[str, Style],
    prefix: str = "",
) -> nn.Module:
    """Replace layers of `module` in place by parallel layers with the same values, and return the
    module.

    styles: a style for each pattern of paths in the module ("*" matches any characters). Each
        nn.Linear and nn.Embedding must match a pattern; norms are always replaced, and each
        nn.Dropout by one that drops the same elements for every number of tensor-parallel ranks.
        All other parameters are replicated on every rank, as are those of nn.MultiheadAttention.
    prefix: text before each path. Pipeline stages need different prefixes, because names are unique
        in the whole model.
    Activations are [sequence, batch, features] if `context.sequence` shards them. A frozen
    parameter stays frozen, and parameters that are cut alike stay tied.

    Raises UserError, naming paths, for layers without a style, patterns that match no layer, sizes
    that do not divide by tp, and layers of which a parallel layer would lose something: a forward
    of their own, hooks, FP32 marks (`megaprec.precision.marks`).
    On several tensor-parallel ranks, forward passes raise UserError for operations on slices of
    features that one process would compute from all of them, and for inputs that differ between
    these ranks.
    """
    _require_argument_types(module, context, styles, prefix)
    # it has no parent in which it could be replaced
    if _has_parallel_form(module):
        raise UserError.of("parallel.root_not_replaceable", kind=type(module).__name__)
    layers = dict(_layers(module))
    style_by_path = {path: _style_of(path, layer, styles) for path, layer in layers.items()}
    replaced = {path: layer for path, layer in layers.items() if style_by_path[path] != "whole"}
    # what is no style describes the problem with the layer
    problems = [f"{path}: {style}" for path, style in style_by_path.items() if style not in STYLES]
    problems += _unmatched_patterns(styles, module, layers)
    problems += _undivided_layers(layers, style_by_path, context)
    problems += _broken_ties(module, replaced, style_by_path, context)
    problems += _problems_of_kept_parameters(module, replaced, context)
    if problems:
        raise UserError(*problems)

    watch = CheckedPasses(context)
    tied = _tied_parameters(module)  # before their layers are replaced, which unties them
    replacements: dict[int, nn.Module] = {}
    # after all checks: a problem must leave the module as it was
    for path, layer in replaced.items():
        if id(layer) not in replacements:  # a layer may have several paths
            new_layer = _parallel_layer(
                layer,
                style_by_path[path],
                context,
                prefix + path,
                watch,
            )
            replacements[id(layer)] = new_layer
            # code may hold the old layer past torch's modules, as in a list
            layer.register_forward_pre_hook(partial(_refuse_replaced, path))
        module.set_submodule(path, replacements[id(layer)])
    _tie(module, tied, replaced)
    _replace_dropouts(module, prefix, watch)
    if context.tp.size > 1:
        _register_watch(module, watch)
    attach_whole(module, context.tp, prefix)
    return module


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have a parallel form, by each of their paths.

    Those within nn.MultiheadAttention are not among them: it computes with their weights itself.
    """
    modules = list(module.named_modules(remove_duplicate=False))
    attentions = [path for path, child in modules if isinstance(child, nn.MultiheadAttention)]
    # the path of the root is empty: if the root is such an attention, all layers are within it
    attention_prefixes = tuple(f"{path}." if path else "" for path in attentions)
    for path, layer in modules:
        if _has_parallel_form(layer) and not path.startswith(attention_prefixes):
            yield path, layer


def _unmatched_patterns(
    styles: Mapping[str, Style],
    module: nn.Module,
    layers: Mapping[str, nn.Module],
) -> Iterator[str]:
    """Yield a line about each pattern that matches no layer."""
    for pattern in styles:
        if not any(fnmatchcase(path, pattern) for path in layers):
            yield _describe_unmatched(pattern, module, layers)


def _describe_unmatched(
    pattern: str,
    module: nn.Module,
    layers: Mapping[str, nn.Module],
) -> str:
    """Return a line about a pattern that matches no layer, with the reason: it matches a parallel
    layer, or a module of another kind, or nothing. layers: those that can be replaced, by path."""
    for path, child in module.named_modules():
        if fnmatchcase(path, pattern) and isinstance(child, PARALLEL_LAYERS):
            return (
                f'styles: "{pattern}" matches {path}, which is a parallel layer already: call '
                "parallelize once, with the styles of all layers"
            )
        has_parameters = next(child.parameters(), None) is not None
        if not (path and fnmatchcase(path, pattern) and has_parameters):
            continue
        kind = type(child).__name__
        # of transformers' GPT-2: its weight is that of nn.Linear, transposed
        if kind == "Conv1D":
            remedy = f"replace it by an nn.Linear of {path}.weight.T, or leave"
        else:
            remedy = "leave"
        return (
            f'styles: "{pattern}" matches {path}, a {kind}, and only nn.Linear, nn.Embedding and '
            f"torch's norms can be replaced: {remedy} the pattern out, and each rank has it whole"
        )
    return f'styles: "{pattern}" matches no layer{did_you_mean(pattern, layers)}'


def _undivided_layers(
    layers: Mapping[str, nn.Module],
    style_by_path: Mapping[str, str],
    context: Context,
) -> Iterator[str]:
    """Yield a line for each linear layer whose features do not divide by the number of
    tensor-parallel ranks."""
    for path, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            continue
        if style_by_path[path] == "column":
            count = layer.out_features
            kind = "output"
        elif style_by_path[path] == "row":
            count = layer.in_features
            kind = "input"
        else:
            continue  # its features are not sharded
        if count % context.tp.size:
            yield (
                f"{path}: {count} {kind} features do not divide by tensor = {context.tp.size}: "
                'give it the style "whole", or a size that divides'
            )


def _replace_dropouts(
    module: nn.Module,
    prefix: str,
    watch: CheckedPasses,
) -> None:
    """Replace each nn.Dropout of the module by one that drops the same elements for every number
    of tensor-parallel ranks.

    prefix: text before each path. nn.MultiheadAttention and recurrent layers of torch drop by
    themselves and have no nn.Dropout.
    """
    replacements: dict[int, Dropout] = {}  # by the id of what they replace
    for path, dropout in list(module.named_modules(remove_duplicate=False)):
        if type(dropout) is nn.Dropout and path:
            # one for all paths of a dropout, because its random numbers depend on its path
            replacements.setdefault(id(dropout), Dropout(dropout, prefix + path, watch))
            module.set_submodule(path, replacements[id(dropout)])


def _register_watch(module: nn.Module, watch: CheckedPasses) -> None:
    """Register hooks that begin and end the passes of `watch` with calls of the module, and that
    look for slices in what torch's own modules in it are given (`_note_slices`)."""
    module.register_forward_pre_hook(watch.begin)
    module.register_forward_hook(watch.end, always_call=True)
    for path, child in module.named_modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            # its fast path for evaluation would compute with the slices of weights by itself
            child.activation_relu_or_gelu = 0
        if isinstance(child, nn.TransformerEncoder):
            child.use_nested_tensor = False
        passes_slices_on = isinstance(child, (*CONTAINERS, nn.Identity))
        is_of_torch = type(child).__module__.startswith("torch.nn.modules")
        if path and is_of_torch and not passes_slices_on:
            child.register_forward_pre_hook(partial(_note_slices, path), with_kwargs=True)


def _note_slices(
    path: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Note in each slice among a module's arguments that the module at `path` is given it. Raise
    UserError for a slice if the module has parameters or buffers, which each rank has whole."""
    parameters_and_buffers = (*module.parameters(), *module.buffers())
    has_values = len(parameters_and_buffers) > 0
    for x in tensors((args, kwargs)):
        if not isinstance(x, CutTensor):
            continue
        # for the message, if an operation inside refuses the slice
        x.given_to = path  # type: ignore[attr-defined]
        if has_values:
            raise UserError.of(
                "parallel.whole_layer_gets_slice",
                path=path,
                kind=type(module).__name__,
                source=x.cut.source,
            )


def _refuse_replaced(path: str, *_: object) -> None:
    """Raise UserError for a layer that was replaced, but is reached past torch's modules: nothing
    would train it."""
    raise UserError.of("parallel.old_layer_called", path=path)


def _require_argument_types(
    module: object,
    context: object,
    styles: object,
    prefix: object,
) -> None:
    """Raise UserError for arguments of another kind, and for a module without values, of which
    ranks keep slices."""
    problems: list[Problem] = []
    if not isinstance(module, nn.Module):
        problems.append(Problem.of("parallel.not_a_module", kind=type(module).__name__))
    if not isinstance(context, Context):
        problems.append(Problem.of("parallel.not_a_context", context=context))
    if not isinstance(styles, Mapping):
        problems.append(Problem.of("parallel.not_styles", styles=styles))
    if not isinstance(prefix, str):
        problems.append(Problem.of("parallel.prefix_not_text", prefix=prefix))
    if problems:
        raise UserError(*problems)
    assert isinstance(module, nn.Module)
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta" or nn.parameter.is_lazy(parameter):
            raise UserError.of("parallel.no_values_yet", name=name)


def _has_parallel_form(layer: nn.Module) -> bool:
    return isinstance(layer, PLAIN)


def _style_of(
    path: str,
    layer: nn.Module,
    styles: Mapping[str, Style],
) -> str:
    """Return the style of the first pattern that matches the layer's path, or, as text that is no
    style, the problem with the layer."""
    matching = (style for pattern, style in styles.items() if fnmatchcase(path, pattern))
    style = next(matching, "")
    if isinstance(layer, NORMS):
        return _style_of_norm(layer, style)
    if style == "whole":
        return style
    if lost := _loss_in_replacing(layer):
        return lost
    if isinstance(layer, nn.Embedding):
        fitting = ("vocab", "whole")
    else:
        fitting = ("column", "row", "whole")
    if style in fitting:
        return style
    problem = f"{style!r} is not a style of" if style else "no style is given to"
    choices = " or ".join(map(repr, fitting))
    return f"{problem} {type(layer).__name__}: give it {choices}"


def _style_of_norm(layer: nn.Module, style: str) -> str:
    """Return the style of a norm, or, as text that is no style, the problem with it.

    It is "norm" or "heads" if a parallel layer replaces the norm, otherwise "whole". style: what
    the patterns say, "" if none matches.
    """
    assert isinstance(layer, NORMS)
    has_weight = layer.weight is not None
    # without weights, or over several dimensions, there is no parallel norm
    has_form = type(layer) in NORMS and len(layer.normalized_shape) == 1
    replaceable = has_form and has_weight
    if style == "heads" and not replaceable:
        return (
            "only an nn.RMSNorm or nn.LayerNorm over one dimension, with its weight, can have the "
            'style "heads"'
        )
    if not replaceable:
        return "whole"
    if lost := _loss_in_replacing(layer):
        return "whole" if style == "whole" else lost
    return "heads" if style == "heads" else "norm"


def _loss_in_replacing(layer: nn.Module) -> str:
    """Return in words what a parallel layer in the place of `layer` would lose, such as hooks, and
    what to do; "" if it would lose nothing."""
    keep = 'or give it the style "whole"'
    # a subclass may compute something else
    if type(layer) not in PLAIN:
        kind = type(layer).__name__
        return (
            f"{kind} is a subclass, whose own behaviour a parallel layer does not have: use "
            f"torch's, {keep}"
        )
    extra_names = {name for name, _ in layer.named_parameters()} - {"weight", "bias"}
    if extra_names:
        return f"the parameter {min(extra_names)} has no parallel form: remove it, {keep}"
    if has_any_hook(layer):
        return f"hooks of a layer would be lost: register them after parallelize, {keep}"
    if any(map(has_any_hook, layer.parameters())):
        return (
            "hooks of its parameters would be lost, and a parallel layer calls none with "
            f"gradients: remove them, {keep}"
        )
    if module_has_fp32_attr(layer):
        return "the FP32 mark would be lost: mark the layer after parallelize"
    for name, default in EMBEDDING_OPTIONS.items():
        if getattr(layer, name, default) != default:
            return f"{name} of an embedding has no parallel form: leave it out, {keep}"
    return ""


def _tied_parameters(module: nn.Module) -> list[list[str]]:
    """Return the paths of each parameter that has several."""
    paths_by_id: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths_by_id.setdefault(id(parameter), []).append(path)
    return [paths for paths in paths_by_id.values() if len(paths) > 1]


def _broken_ties(
    module: nn.Module,
    replaced: Mapping[str, nn.Module],
    style_by_path: Mapping[str, str],
    context: Context,
) -> Iterator[str]:
    """Yield a line for each tied parameter, one with several paths, that these styles would cut in
    different ways. replaced: the layers that parallel ones are to replace, by path."""
    for paths in _tied_parameters(module):
        holders = [path.rpartition(".")[0] for path in paths]
        if not any(holder in replaced for holder in holders):
            continue
        # how each of the layers that hold it would have it: the dim it is cut along, None if whole
        cuts: set[int | str | None] = set()
        for path, holder in zip(paths, holders, strict=True):
            if holder in replaced:
                name = path.rpartition(".")[2]
                cuts.add(SLICED_DIM.get((style_by_path[holder], name)))
            else:
                cuts.add("held by no parallel layer")
        # several layers would each have FP8 scales of their own for it
        holding_layers = {id(replaced.get(holder)) for holder in holders}
        has_fp8_copies = context.plan.fp8 and len(holding_layers) > 1
        if len(cuts) > 1 or has_fp8_copies:
            yield (
                f"{' and '.join(paths)} are one parameter, and these styles would cut it in "
                'different ways: give both layers the style "whole", give an embedding "vocab" and '
                'a head "column", or untie them'
            )


def _tie(
    module: nn.Module,
    tied: list[list[str]],
    replaced: Mapping[str, nn.Module],
) -> None:
    """Make parameters that were one parameter one again, after their layers have been replaced.

    tied: the paths of each such parameter. replaced: the layers that were replaced, by path.
    """
    # The first of the paths has a parallel layer's parameter: the others get it too.
    for paths in tied:
        first, *other_paths = paths
        if first.rpartition(".")[0] not in replaced:
            continue
        parameter = module.get_parameter(first)
        for other_path in other_paths:
            holder, _, name = other_path.rpartition(".")
            setattr(module.get_submodule(holder), name, parameter)


def _problems_of_kept_parameters(
    module: nn.Module,
    replaced: Mapping[str, nn.Module],
    context: Context,
) -> list[str]:
    """Return a line if parameters are left that no parallel layer replaces, and the context does
    not allow for them; otherwise nothing."""
    plan = context.plan
    replaced_ids: set[int] = set()
    for layer in replaced.values():
        replaced_ids.update(map(id, layer.parameters()))
    kept = [
        name for name, parameter in module.named_parameters() if id(parameter) not in replaced_ids
    ]
    # each rank would have the gradient of its own part of the sequence only
    if kept and context.cut_sequence:
        return [
            f"{kept[0]}: under sequence parallelism a parameter outside parallel layers would "
            "miss its all-reduce"
        ]
    # torch's own layers compute in the dtype of their weights
    if kept and plan.compute != plan.parameters:
        return [
            f"{kept[0]}: a plan that computes in another dtype than that of parameters needs "
            "parallel layers only"
        ]
    return []


def _parallel_layer(
    layer: nn.Module,
    style: str,
    context: Context,
    name: str,
    watch: CheckedPasses,
) -> nn.Module:
    """Return the parallel layer of a style with this rank's slice of the values of `layer`.

    name: the path of the layer, by which its parameters are named. watch: the passes through the
    module, noted by layers on several tensor-parallel ranks.
    """
    # one rank needs no checks of what it is given
    watched = context.tp.size > 1
    if isinstance(layer, NORMS):
        new = _parallel_norm(
            layer,
            context,
            name,
            watched,
            of_heads=style == "heads",
        )
    elif isinstance(layer, nn.Embedding):
        embedding = Vocab if watched else VocabParallelEmbedding
        new = embedding(context, layer.num_embeddings, layer.embedding_dim, name=name)
    else:
        assert isinstance(layer, nn.Linear)
        has_bias = layer.bias is not None
        linear: Any
        if style == "column":
            linear = Column if watched else ColumnParallelLinear
        else:
            linear = Row if watched else RowParallelLinear
        new = linear(
            context,
            layer.in_features,
            layer.out_features,
            name=name,
            bias=has_bias,
        )
    if isinstance(new, Watched):
        new.watch = watch
        new.path = name
    for path, parameter in new.named_parameters():
        old_parameter = layer.get_parameter(path)
        _copy_slice(parameter, old_parameter)
        parameter.requires_grad_(old_parameter.requires_grad)
    return new


def _parallel_norm(
    layer: nn.Module,
    context: Context,
    name: str,
    watched: bool,
    of_heads: bool,
) -> nn.Module:
    """Return the parallel norm in the place of `layer`, with initial values of its own.

    watched: it checks what it is given. of_heads: it is over the features of one head, and heads
    are cut over tp.
    """
    make_norm: Any
    if isinstance(layer, nn.RMSNorm):
        make_norm = WatchedRMSNorm if watched else RMSNorm
        # torch's default: the epsilon of the dtype
        eps = torch.finfo(layer.weight.dtype).eps if layer.eps is None else layer.eps
    else:
        assert isinstance(layer, nn.LayerNorm)
        layer_norm = WatchedLayerNorm if watched else LayerNorm
        make_norm = partial(layer_norm, bias=layer.bias is not None)
        eps = layer.eps
    # of heads, each rank sees its own ones, so that it has a partial gradient
    norm = make_norm(
        context,
        layer.normalized_shape[0],
        name=name,
        eps=eps,
        differs_over_tp=of_heads,
    )
    if isinstance(norm, WatchedRMSNorm | WatchedLayerNorm):
        norm.of_heads = of_heads
    return norm


@torch.no_grad()
def _copy_slice(parameter: nn.Parameter, full: Tensor) -> None:
    """Copy this rank's slice of the plain parameter `full` to the parallel layer's `parameter`,
    whose padding stays as it is."""
    part = layout_of(parameter).parts[0]
    unpadded = tuple(slice(length) for length in part.local)
    parameter[unpadded].copy_(part.take(full))
