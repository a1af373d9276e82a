"""Reading InternEvo's checkpoints: a file of each rank, model_tp{t}_pp{p}.pt, and the model's dict
in model_config.pt.

    model_tp0_pp0.pt          a rank along tensor and pipeline parallelism
    model_wp0_pp0.pt          weight parallelism: rows of every layer over wp (model_tp0_wp0_pp0.pt in older versions,
                              where embedding and head are cut over tp)

Layers are numbered within a stage; with num_chunks > 1 a file has stages one after another,
0.model.blocks.0, ... The bias of a layer whose columns are cut is in the first rank's file alone
(internlm/checkpoint/components.py, internlm/model/ops/linear.py). No pickle is opened in this
process (`tools.convert.core.untrusted`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.convert.core.names import BUFFERS, internevo
from tools.convert.core.rules import matches
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents, state_in
from tools.convert.hf.folder import check_tensors, hf_tokenizer, origin_of
from tools.convert.megatron.ranks import TensorSource, notes_on_copies, number_over_stages
from tools.convert.systems.internevo_model import model_of
from tools.convert.systems.shards import collect_shards, merge_shards

CONFIG = "model_config.pt"
FILE = re.compile(r"model_(?:tp(\d+)_)?(?:wp(\d+)_)?pp(\d+)\.pt")
RANK = re.compile(r"(?:model|topo|optimizer)_(?:tp(\d+)_)?(?:wp(\d+)_)?pp(\d+)(?:_\w+)?\.\w+")
SHARDED = re.compile(r"model_tp\d+_pp\d+_(?:dp|zo)\d+\.pt")
EXPERT = re.compile(r"model_moe_layer\d+_expert\d+_\w+\.pt")
LAYER = re.compile(r"^(blocks\.)(\d+)(\..*)$")
CHUNK = re.compile(r"(\d+)\.(?:model\.)?(.*)")
LONE = (".out_proj.bias",)
EXPORT = "InternEvo's transformers/convert2hf_internlm.py makes a Hugging Face folder of it"


@dataclass(frozen=True)
class Files:
    """The ranks' tensors, (tp, wp, pp) -> those of each chunk. sizes: ranks along the three; None:
    not in the names."""

    path: Path
    held: Mapping[tuple[int, int, int], list[dict[str, Stored]]]
    sizes: tuple[int, int, int]
    weight_parallel: bool


def find_internevo(path: Path) -> Path | None:
    """`path`, if it has files of InternEvo's ranks."""
    return path if any(_is_ranks(file.name) for file in path.iterdir()) else None


def _is_ranks(name: str) -> bool:
    return any(kind.fullmatch(name) for kind in (FILE, SHARDED, EXPERT))


def open_internevo(path: Path) -> Source:
    """Opens the folder of a step. UserError for what is missing, surplus or not known."""
    _refuse_kinds(path)
    files = _read(path)
    said = _said(path / CONFIG)
    by_name = _by_name(files)
    mlp, ffn = _feed_forward(path, by_name)
    biased = "blocks.0.mixer.Wqkv.bias" in by_name
    model, note = model_of(said, "gate" in mlp.values(), ffn, biased, str(path / CONFIG))
    chunks = len(next(iter(files.held.values())))
    if said.get("num_chunks", chunks) != chunks:
        raise UserError(
            f"{path / CONFIG}: num_chunks = {said['num_chunks']}, but the files hold {chunks}"
        )
    found = matches(
        internevo(mlp, _split_hidden(by_name, model.hidden), files.weight_parallel), model
    )
    weights = merge_shards(path, found, by_name)
    check_tensors(path, found, weights)
    origins = [
        origin_of(m, weights[m.foreign].read, weights[m.foreign].dtype, model) for m in found
    ]
    tp, wp, pp = files.sizes
    layout = {"tensor": tp, "pipeline": pp} | ({"weight": wp} if files.weight_parallel else {})
    facts = Facts(
        layout=layout,
        unread=_unread(path),
        notes=(*filter(None, (note,)), *notes_on_copies(path, _distinct(files))),
    )
    return Source(path, "internevo", model, origins, facts, hf_tokenizer(path))


def _refuse_kinds(path: Path) -> None:
    for kind, what in ((SHARDED, "a part of each parameter (zero1.fsdp)"), (EXPERT, "experts")):
        if name := next(
            (file.name for file in sorted(path.iterdir()) if kind.fullmatch(file.name)), None
        ):
            raise UserError(f"{path / name} holds {what}, which cannot be read here")


def _read(path: Path) -> Files:
    names = sorted(file.name for file in path.iterdir())
    found = {name: match for name in names if (match := FILE.fullmatch(name))}
    forms = {tuple(group is not None for group in match.groups()) for match in found.values()}
    if len(forms) > 1:
        raise UserError(f"{path} has files of two forms: {', '.join(found)}")
    ((tensor, weight, _),) = forms
    places = {name: _place(match) for name, match in found.items()}
    seen = [_place(match) for name in names if (match := RANK.fullmatch(name))]
    tp, wp, pp = (1 + max(place[axis] for place in seen) for axis in range(3))
    there = {place: name for name, place in places.items()}
    if twice := [name for name, place in places.items() if there[place] != name]:
        raise UserError(
            f"{path / twice[0]} and {there[places[twice[0]]]} are both of one rank: move one away"
        )
    for t, w, p in product(range(tp), range(wp), range(pp)):
        # with both, a rank has one number of each, and not every pair is a rank
        whole = not (tensor and weight)
        if whole and (t, w, p) not in there:
            name = "_".join(("model", *(f"tp{t}",) * tensor, *(f"wp{w}",) * weight, f"pp{p}.pt"))
            raise UserError(f"{path / name} is missing")
    held = contents([path / name for name in places])
    return Files(
        path,
        {place: _chunks(path / name, held[n]) for n, (name, place) in enumerate(places.items())},
        (tp, wp, pp),
        weight,
    )


def _place(match: re.Match[str]) -> tuple[int, int, int]:
    tensor, weight, pipeline = (int(number or 0) for number in match.groups())
    return tensor, weight, pipeline


def _chunks(file: Path, state: Any) -> list[dict[str, Stored]]:
    """A file's tensors, of each of its chunks: names as the chunk alone would have them."""
    chunks: dict[int, dict[str, Stored]] = {}
    for name, stored in state_in(file, state).items():
        if name.endswith(BUFFERS):
            continue
        match = CHUNK.fullmatch(name)
        number, own = (int(match[1]), match[2]) if match else (0, name.removeprefix("model."))
        chunks.setdefault(number, {})[own.replace("embedding.word_embeddings.", "embedding.")] = (
            stored
        )
    if sorted(chunks) != [*range(len(chunks))] or not chunks:
        raise UserError(f"{file} lacks a chunk of the model")
    return [chunks[number] for number in sorted(chunks)]


def _said(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise UserError(
            f"{file} is missing: it holds the dict `model` of InternEvo's configuration, "
            "which says what the model is; "
            "InternEvo's train.py saves it, and torch.save(dict(num_layers=...), ...) makes it"
        )
    (said,) = contents([file])
    if not isinstance(said, dict):
        raise UserError(f"{file} does not hold a dict, as InternEvo's files do")
    return said


def _by_name(files: Files) -> dict[str, list[TensorSource]]:
    """Name, with layers counted over all stages -> its parts. Stages are in the order of chunks,
    then of ranks."""
    chunks = {place: len(own) for place, own in files.held.items()}
    if len(set(chunks.values())) > 1:
        raise UserError(f"{files.path}: its files do not hold equally many chunks of the model")
    stages = [
        _stage(files, p, c) for c in range(max(chunks.values())) for p in range(files.sizes[2])
    ]
    last = len(stages) - 1
    return number_over_stages(
        files.path, stages, LAYER, {"embedding.": 0, "norm.": last, "head.": last}
    )


def _distinct(files: Files) -> dict[tuple[int, int, int], list[dict[str, Stored]]]:
    """The ranks' tensors, without ranks that hold what another does by design: where weight
    parallelism cuts layers, those with the same part of a stage that has nothing but layers."""
    found: dict[tuple[int, int, int], list[dict[str, Stored]]] = {}
    for (t, w, p), chunks in files.held.items():
        layers = files.weight_parallel and all(
            LAYER.match(name) for chunk in chunks for name in chunk
        )
        found.setdefault((0 if layers else t, w, p), chunks)
    return found


def _stage(files: Files, stage: int, chunk: int) -> dict[str, list[TensorSource]]:
    tp, wp, _ = files.sizes

    def place(t: int, w: int, name: str) -> tuple[int, int]:
        """Weight parallelism cuts layers over wp, and the ends of the model over tp where files
        name both."""
        by_weight = files.weight_parallel and (LAYER.match(name) is not None or tp == 1)
        return (w, wp) if by_weight else (t, tp)

    ranks = [
        (lambda name, t=t, w=w: place(t, w, name), held[chunk])
        for (t, w, p), held in files.held.items()
        if p == stage
    ]
    return collect_shards(files.path, ranks, LONE)


def _feed_forward(
    path: Path, by_name: Mapping[str, Sequence[TensorSource]]
) -> tuple[dict[str, str], int]:
    """InternEvo's names of the feed-forward's layers -> ours, and its width.

    Before 2024 w3 was the closing one, since then w2 is (internlm/model/modules/mlp.py): their
    shapes tell.
    """
    own = {
        name: by_name.get(f"blocks.0.mlp.{name}.weight")
        for name in ("w1", "w2", "w3", "fc1", "fc2")
    }
    if own["fc1"] and own["fc2"]:
        return {"fc1": "up", "fc2": "down"}, sum(part.shape[0] for part in own["fc1"])
    if not (own["w1"] and own["w2"] and own["w3"]):
        raise UserError(
            f"{path} is no model of InternEvo's INTERNLM type: it lacks blocks.0.mlp.w1, .w2 "
            f"and .w3; {EXPORT}"
        )
    first, second, third = (
        tuple(part.shape for part in own[name] or ()) for name in ("w1", "w2", "w3")
    )
    if second == third:
        raise UserError(
            f"{path}: w2 and w3 of the feed-forward have the same shape {list(second[0])}, "
            "and which of them closes it "
            f"depends on InternEvo's version: {EXPORT}"
        )
    width = sum(shape[0] for shape in first)
    return {"w1": "gate", "w3": "up", "w2": "down"} if third == first else {
        "w1": "gate",
        "w2": "up",
        "w3": "down",
    }, width


def _split_hidden(by_name: Mapping[str, Sequence[TensorSource]], hidden: int) -> bool:
    """Return True if ranks hold all tokens of the embedding and some features of each."""
    parts = by_name.get("embedding.weight", ())
    return len(parts) > 1 and parts[0].shape[-1] != hidden


def _unread(path: Path) -> str:
    """Return the files that are ignored: those beside the weights."""
    names = [file.name for file in path.iterdir()]
    if any(n.startswith("optimizer_") for n in names):
        optimizer = ["the optimizer's state (optimizer_*.pt)"]
    else:
        optimizer = []
    known = ("schedulder.pt", "context.pt", "config_file.pt")
    others = [n for n in sorted(names) if n.startswith("sampler") or n in known]
    return ", ".join(optimizer + others)
