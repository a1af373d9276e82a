"""Flat buckets of the distributed optimizer as the format is stated, written by torch alone; what
is refused.

That Megatron writes such checkpoints is what the tests with megatron-core show. Between parameters
lies nan here.
"""

import argparse
import pickle
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.convert.test_megatron_stacked import STACKINGS, sizes_read, state_of
from tests.other_systems import write_folder
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import tensors
from tools.cli import main
from tools.convert.core.names import megatron
from tools.convert.core.rules import head_sizes, matches
from tools.convert.core.source import Source
from tools.convert.formats import open_source
from tools.convert.megatron import flat
from tools.convert.megatron.args import args_of
from tools.convert.megatron.layout import cut_part

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about saving without ranks
PADDED = 256
KINDS = ("param", "exp_avg", "exp_avg_sq")
DTYPES = "(torch.bfloat16, torch.float32)"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
ATTENTION = ["self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"]
DENSE = ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
LAYERS = {
    "local": ["input_layernorm.weight", *ATTENTION, "pre_mlp_layernorm.weight", *DENSE],
    "fused": [
        ATTENTION[0],
        "self_attention.linear_qkv.layer_norm_weight",
        ATTENTION[1],
        "mlp.linear_fc1.layer_norm_weight",
        *DENSE,
    ],
}
SPARSE = ["input_layernorm.weight", *ATTENTION, "pre_mlp_layernorm.weight", "mlp.router.weight"]
EXPERT = "mlp.experts.local_experts."
LAYERS["one by one"] = [
    *SPARSE,
    *(f"{EXPERT}{e}.linear_fc{n}.weight" for e in range(3) for n in (1, 2)),
]
LAYERS["packed"] = [
    *SPARSE,
    *(f"{EXPERT}{e}.linear_fc{n}.weight" for n in (1, 2) for e in range(3)),
]


Place = tuple[int, int, int, int]  # optimizer, model-parallel rank, virtual stage, kind
Places = dict[Place, list[Tensor]]  # buckets


@dataclass(frozen=True)
class Case:
    """way: of layers. stages: of each pipeline rank the layers of its virtual stages. bucket:
    elements that fill one.

    For faults: what a parameter's start is a multiple of; whether the first comes first; which flat
    tensors go where; and more of the args.
    """

    kind: str
    way: str
    tp: int = 1
    stages: tuple[tuple[range, ...], ...] = ((range(4),),)
    ep: int = 1
    bucket: int = 0
    aligned: int = 64
    forward: bool = False
    moved: Callable[[Places], Places] = dict
    more: Mapping[str, Any] = field(default_factory=dict)

    def args(self, source: Source) -> dict[str, Any]:
        found = args_of(
            source.model, PADDED, self.tp, len(self.stages), self.way == "fused", torch.bfloat16
        )
        found |= {
            "virtual_pipeline_model_parallel_size": len(self.stages[0]),
            "moe_grouped_gemm": self.way == "packed",
        }
        return (
            found
            | {"expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": self.tp}
            | dict(self.more)
        )


HALVES = ((range(2),), (range(2, 4),))
TURNS = ((range(1), range(2, 3)), (range(1, 2), range(3, 4)))
CASES = {
    "stages, several buckets": Case("llama", "fused", 2, HALVES, bucket=3000),
    "virtual stages": Case("llama", "local", 1, TURNS, bucket=3000),
    "a tied embedding": Case("llama-tied", "local", 1, HALVES, bucket=3000),
    "experts": Case("mixtral", "one by one", 2, HALVES),
    "experts of their own": Case("mixtral", "one by one", 2, HALVES, 3, 3000),
    "packed experts": Case("mixtral", "packed", 2, TURNS),
    "packed experts of their own": Case("mixtral", "packed", 1, TURNS, 3),
}


def names_of(case: Case, tied: bool, p: int, v: int) -> list[str]:
    """Of a virtual stage, in the order of Megatron's modules."""
    first = (p, v) == (0, 0)
    last = (p, v) == (len(case.stages) - 1, len(case.stages[0]) - 1)
    inside = [f"decoder.layers.{n}.{name}" for n in case.stages[p][v] for name in LAYERS[case.way]]
    head = ["decoder.final_layernorm.weight", *([HEAD] if not (tied and first) else [])]
    return [EMBEDDING] * first + inside + head * last


def flat_of(case: Case, source: Source) -> dict[str, Tensor]:
    """The state of all ranks under its keys."""
    places: Places = {}
    for p, t, e, kind in product(
        range(len(case.stages)), range(case.tp), range(case.ep), range(len(KINDS))
    ):
        for v in range(len(case.stages[p])):
            names = names_of(case, source.model.tied, p, v)
            apart = [n for n in names if EXPERT in n] if case.ep > 1 else []
            shared = [n for n in names if n not in apart]
            places[0, p * case.tp + t, v, kind] = buckets(case, source, shared, kind, t)
            own = [n for n in apart if f"{EXPERT}{e}." in n]
            places[1, (p * case.ep + e) * case.tp + t, v, kind] = buckets(
                case, source, own, kind, t
            )
    return {
        f"{key_of(case, o, number)}gbuf_idx_{v}.dtype_{DTYPES}.bucket_idx_{n}.{KINDS[kind]}": values
        for (o, number, v, kind), held in case.moved(places).items()
        for n, values in enumerate(held)
    }


def key_of(case: Case, optimizer: int, number: int) -> str:
    """How keys of a model-parallel rank begin."""
    return f"chained_{optimizer}." * (case.ep > 1) + f"optimizer.distributed.dp_group_idx_{number}."


def buckets(case: Case, source: Source, names: Sequence[str], kind: int, rank: int) -> list[Tensor]:
    """A buffer of parameters, which hold tensors of these names: one each, or all experts' in
    turn."""
    parameters = [list(held) for _, held in groupby(names, lambda n: parameter_of(case, n))]
    found: list[Tensor] = []
    row: list[Tensor] = []
    for held in parameters if case.forward else reversed(parameters):
        alone = source.model.tied and len(case.stages) > 1 and held[0] in (EMBEDDING, HEAD)
        row.append(torch.full((-sum(map(len, row)) % case.aligned,), torch.nan))
        if alone and len(row) > 1:
            found = [*found, torch.cat(row)]
            row = []
        row += [part_of(case, source, name, kind, rank).flatten() for name in held]
        if alone or 0 < case.bucket <= sum(map(len, row)):
            found = [*found, torch.cat(row)]
            row = []
    return [*found, torch.cat(row)] if row else found


def parameter_of(case: Case, name: str) -> str:
    return re.sub(r"experts\.\d+", "", name) if case.way == "packed" else name


def part_of(case: Case, source: Source, name: str, kind: int, rank: int) -> Tensor:
    """Moments are multiples of the weight, so that no two values of a checkpoint are alike."""
    known = {
        match.foreign: match
        for match in matches(megatron(case.way == "fused", False, source.model), source.model)
    }
    match = known[EMBEDDING if source.model.tied and name == HEAD else name]
    whole = match.how.join(
        [source.read(f"weight/{part}") for part in match.logical], head_sizes(source.model)
    ) * (kind + 1)
    values = cut_part(whole, match.cut, rank, case.tp, PADDED)
    return values.t() if case.way == "packed" and EXPERT in name else values


def write(folder: Path, case: Case, source: Source, ranks: int = 1) -> Path:
    """A checkpoint of bf16 weights with the state beside it, each tensor in as many pieces as there
    are ranks."""
    weights = {
        name: values.bfloat16() for name, values in state_of(source, STACKINGS["experts"]).items()
    }
    tensors = weights | flat_of(case, source)
    first = key_of(case, 0, 0)
    if ranks > 1:
        run_ranks(save_pieces, {"dp": ranks}, folder=folder, tensors=tensors, first=first)
    else:
        save(folder, tensors, first)
    args = argparse.Namespace(**case.args(source))
    common = {
        "args": args,
        "iteration": 9,
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
    }
    torch.save(common, folder / "common.pt")
    return folder


def save_pieces(mesh: DeviceMesh, folder: Path, tensors: dict[str, Tensor], first: str) -> None:
    save(
        folder,
        {
            name: distribute_tensor(values, mesh["dp"], [Shard(0)])
            for name, values in tensors.items()
        },
        first,
    )


def save(folder: Path, tensors: dict[str, Tensor], first: str) -> None:
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    said = {"optimizer": {"param_groups": [{"lr": 0.1}, {"step": 7}]}, "grad_scaler": scaler}
    state = tensors | {f"{first}{name}/shard_0_1": [content] for name, content in said.items()}
    dcp.save(state, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False))


def opened(case: Case, tmp_path: Path, ranks: int = 1) -> tuple[Source, Path]:
    """The model, and the checkpoint of it."""
    source = open_source(write_folder(tmp_path / "hf", case.kind))
    return source, write(tmp_path / "dist", case, source, ranks)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("torch_files_read_here")
def test_masters_and_moments_are_taken_out_of_the_buckets(case: Case, tmp_path: Path) -> None:
    check(*opened(case, tmp_path))


@pytest.mark.slow
def test_data_parallel_ranks_may_have_written_them_in_pieces(tmp_path: Path) -> None:
    check(*opened(DENSE_CASE, tmp_path, ranks=3))


@pytest.mark.slow
@pytest.mark.usefixtures("torch_files_read_here")
def test_metadata_may_be_of_a_class_of_megatrons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is up to Megatron-core 0.15."""
    source, folder = opened(DENSE_CASE, tmp_path)
    name = "megatron.core.dist_checkpointing.strategies.torch"
    theirs = type("MCoreMetadata", (Metadata,), {"__module__": name})
    module = types.ModuleType(name)
    module.MCoreMetadata = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    kept = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(theirs(**vars(kept))))
    check(source, folder)


def check(source: Source, folder: Path) -> None:
    read = open_source(folder)
    assert read.kinds == ("weight", "exp_avg", "exp_avg_sq")
    for number, kind in enumerate(read.kinds):
        for key in source.keys("weight"):
            assert torch.equal(
                read.read(key.replace("weight/", f"{kind}/", 1)), source.read(key) * (number + 1)
            ), key
    assert read.facts.steps == 7
    assert read.facts.scaler == {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}


def numbered(change: Callable[[int, int, int, int], Place]) -> Callable[[Places], Places]:
    return lambda places: {change(*place): held for place, held in places.items()}


DENSE_CASE = CASES["stages, several buckets"]
EXPERTS_CASE = CASES["experts of their own"]
LAYOUT = "convert.megatron_flat_state"
MASTER = "convert.megatron_master_differs"
FAULTS: dict[str, tuple[Case, str]] = {
    "from the first to the last": (replace(DENSE_CASE, forward=True), LAYOUT),
    "aligned to 128": (replace(DENSE_CASE, aligned=128), LAYOUT),
    "not aligned": (replace(DENSE_CASE, aligned=1), LAYOUT),
    "buckets in another order": (
        replace(DENSE_CASE, moved=lambda p: {k: v[::-1] for k, v in p.items()}),
        LAYOUT,
    ),
    "tensor-parallel ranks": (
        replace(DENSE_CASE, moved=numbered(lambda o, n, v, k: (o, n ^ 1, v, k))),
        MASTER,
    ),
    "stages": (replace(DENSE_CASE, moved=numbered(lambda o, n, v, k: (o, n ^ 2, v, k))), LAYOUT),
    "virtual stages": (
        replace(CASES["virtual stages"], moved=numbered(lambda o, n, v, k: (o, n, 1 - v, k))),
        LAYOUT,
    ),
    "optimizers": (
        replace(EXPERTS_CASE, moved=numbered(lambda o, n, v, k: (1 - o, n, v, k))),
        LAYOUT,
    ),
    "experts": (
        replace(EXPERTS_CASE, moved=numbered(lambda o, n, v, k: (o, (n + 2 * o) % 12, v, k))),
        MASTER,
    ),
    "kinds": (
        replace(DENSE_CASE, moved=numbered(lambda o, n, v, k: (o, n, v, (k + 1) % 3))),
        MASTER,
    ),
    "a kind missing": (
        replace(DENSE_CASE, moved=lambda p: {k: v for k, v in p.items() if k[3] != 2}),
        LAYOUT,
    ),
    "a rank missing": (
        replace(DENSE_CASE, moved=lambda p: {k: v for k, v in p.items() if k[1] != 3}),
        LAYOUT,
    ),
    "a rank more": (
        replace(DENSE_CASE, moved=lambda p: p | {(0, 4, 0, k): p[0, 3, 0, k] for k in range(3)}),
        LAYOUT,
    ),
    "experts packed, not one by one": (
        replace(
            CASES["packed experts of their own"], way="one by one", more={"moe_grouped_gemm": True}
        ),
        MASTER,
    ),
    "norms of other layers": (
        replace(DENSE_CASE, way="local", more={"transformer_impl": "transformer_engine"}),
        LAYOUT,
    ),
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("torch_files_read_here")
def test_another_layout_than_the_args_say_is_refused_unless_weights_are_enough(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, code = FAULTS[fault]
    source, folder = opened(case, tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, code)
    assert not (tmp_path / "ours").exists()
    read = open_source(folder, weights_only=True)
    assert read.kinds == ("weight",) and not read.facts.unread
    assert all(
        torch.equal(read.read(key), source.read(key).bfloat16()) for key in source.keys("weight")
    )


def test_weights_alone_are_asked_of_megatron_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    assert main(["convert", str(folder), str(tmp_path / "ours"), "--weights-only"]) == 2
    assert shows(capsys.readouterr().err, "convert.weights_only_unused")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_files_read_here")
def test_a_reader_that_aligns_otherwise_refuses_a_right_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = opened(DENSE_CASE, tmp_path)
    monkeypatch.setattr(flat, "ALIGNED", 128)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, LAYOUT)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_files_read_here")
def test_a_spread_of_layers_that_is_not_known_leaves_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = opened(
        replace(DENSE_CASE, more={"pipeline_model_parallel_layout": "Et|t|ttL"}), tmp_path
    )
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    assert "not read: the optimizer's state" in capsys.readouterr().out
    assert {key.split("/")[0] for key in tensors(tmp_path / "ours")} == {"weight"}


@pytest.mark.slow
@pytest.mark.usefixtures("torch_files_read_here")
def test_of_a_bucket_only_the_tensor_asked_for_is_read(tmp_path: Path) -> None:
    _, folder = opened(CASES["experts"], tmp_path)
    read = open_source(folder)
    with sizes_read() as sizes:
        read.read("exp_avg/layers.1.mlp.experts.2.gate.weight")
    assert max(sizes) == 4 * 40 * 24  # a rank's part of gate and up, which are one tensor there
