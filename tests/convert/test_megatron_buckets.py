"""The distributed optimizer's state in flat buckets (dp_reshardable), as megatron-core itself saves
it: bit for bit."""

import argparse
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from tests.convert.test_megatron import (
    PADDED,
    build_chunks,
    core,
    pretend_there_is_a_gpu,
    run,
    save_in_chunks,
)
from tests.convert.test_megatron_distributed import STEPS, optimizer_of
from tests.convert.test_megatron_experts import specify
from tests.other_systems import CONFIGS, MEGATRON, NEEDS_MEGATRON, slow
from tests.ranks import run_ranks
from tests.runs import tensors
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, head_sizes, matches
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of
from tools.convert.megatron.layout import cut_part

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of megatron-core
    pytest.mark.usefixtures("torch_files_read_here"),
    NEEDS_MEGATRON,
]
PRELOADED = MEGATRON
KINDS = {"param": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
FOUR = {"num_hidden_layers": 4}
Told = tuple[str, str, int, int, Tensor]  # kind, name, which part, of how many, values


@dataclass(frozen=True)
class Case:
    """bucket: elements after which Megatron begins a new one; 0: never. way: of experts, as
    `specify` knows it.

    changes: of the model. options: what else is said to Megatron and in its args, which here have
        the same names.
    """

    kind: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    ep: int = 1
    expert_tp: int = 0
    bucket: int = 0
    way: str = "one by one"
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    form: str = "dp_reshardable"

    def __str__(self) -> str:
        sizes = ("tp", "pp", "virtual", "dp", "ep", "expert_tp", "bucket")
        said = [f"{name}{getattr(self, name)}" for name in sizes if getattr(self, name) > 1]
        return " ".join([self.kind, self.way.replace(" ", "_"), *said, *self.options])

    @property
    def model(self) -> ModelConfig:
        return from_hugging_face({**CONFIGS[self.kind], **self.changes})

    @property
    def parts_of_experts(self) -> int:
        return self.expert_tp or self.tp

    @property
    def fused(self) -> bool:
        """Whether layers are Transformer Engine's."""
        return self.way in ("fused", "grouped")

    def args(self) -> dict[str, Any]:
        """As Megatron-LM keeps them beside the tensors."""
        found = args_of(self.model, PADDED[self.tp], self.tp, self.pp, self.fused, torch.bfloat16)
        found |= {
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.parts_of_experts,
        }
        found |= {
            "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None
        }
        found |= {"moe_grouped_gemm": self.way in ("packed", "grouped")}
        return found | dict(self.options)


def save(mesh: DeviceMesh, case: Case, folder: Path) -> list[Told]:
    """Two steps over bf16 weights, saved as Megatron-LM does; returns what this rank's optimizer
    holds."""
    pretend_there_is_a_gpu()
    chunks = build_chunks(
        case.kind, case.tp, case.pp, torch.bfloat16, case.ep, case.parts_of_experts,
        lambda spec: specify(case.way, spec), case.virtual, configured(case), **case.changes,
    )  # fmt: skip
    return save_chunks(case, chunks, folder)


def save_chunks(case: Case, chunks: list[Any], folder: Path) -> list[Told]:
    """As `save`, of chunks that are made."""
    optimizer = optimizer_of(chunks, zero=True, bucket=case.bucket)
    for step in range(STEPS):
        for name, p in named(case, chunks):
            p.main_grad.copy_(gradient(name, p, step))
        assert optimizer.step()[0]
    group = core("parallel_state").get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": case.form, "dp_cp_group": group}
    state: dict[str, Any] = {
        f"model{v}": chunk.sharded_state_dict(metadata=metadata) for v, chunk in enumerate(chunks)
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    args = argparse.Namespace(**case.args(), iteration=9)
    save_in_chunks({**state, "args": args, "checkpoint_version": 3.0, "iteration": 9}, folder)
    return [told for name, p in named(case, chunks) for told in held_of(case, optimizer, name, p)]


def configured(case: Case) -> dict[str, Any]:
    """Its options, under the names that Megatron's modules have for them."""
    names = {
        f"decoder_{end}_pipeline_num_layers": f"num_layers_in_{end}_pipeline_stage"
        for end in ("first", "last")
    }
    return {names.get(name, name): value for name, value in case.options.items()}


def named(case: Case, chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters with layers and experts numbered over all ranks, as Megatron itself numbers the
    layers."""
    first = core("parallel_state").get_expert_model_parallel_rank() * (
        case.model.experts // case.ep
    )
    experts = range(first, first + case.model.experts)
    for chunk in chunks:
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, p in chunk.named_parameters():
            within = renumbered(name, r"(?:local_experts\.|linear_fc\d\.weight)(\d+)", experts)
            yield renumbered(within, r"layers\.(\d+)", layers), p


def renumbered(name: str, pattern: str, numbers: Sequence[int]) -> str:
    """The name with one of `numbers` in place of the number that the pattern finds, if it does."""
    found = re.search(pattern, name)
    if found:
        return f"{name[: found.start(1)]}{numbers[int(found[1])]}{name[found.end(1) :]}"
    return name


def gradient(name: str, p: Any, step: int) -> Tensor:
    """Alike on ranks that hold the parameter alike, the tied copies too."""
    ranks = core("parallel_state")
    if getattr(p, "tensor_model_parallel", False):
        cut = ranks.get_tensor_model_parallel_rank()
    else:
        cut = 0
    where = f"{ranks.get_expert_tensor_parallel_rank()} {ranks.get_expert_model_parallel_rank()}"
    cut = where if ".experts." in name else cut
    canonical = "embedding" if "word_embeddings" in name or "output_layer" in name else name
    return torch.randn(
        p.shape,
        generator=torch.Generator().manual_seed(zlib.crc32(f"{canonical} {cut} {step}".encode())),
    )


def held_of(case: Case, optimizer: Any, name: str, p: Any) -> Iterator[Told]:
    """What is on this rank of a parameter's masters and moments, each element at its place, nan at
    those elsewhere."""
    ranks = core("parallel_state")
    expert = ".experts." in name
    if expert:
        cut = ranks.get_expert_tensor_parallel_rank()
    else:
        cut = ranks.get_tensor_model_parallel_rank()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if p in one.model_param_gbuf_map:
            there = one._get_model_param_range_map(p)["param"]
            kept = one._get_main_param_and_optimizer_states(p)
            for theirs, ours in KINDS.items():
                values = torch.full((p.numel(),), torch.nan)
                values[there.start : there.end] = kept[theirs]
                of = case.parts_of_experts if expert else case.tp
                yield from (
                    (ours, *one, cut, of, v) for one, v in apart(case, name, values.view(p.shape))
                )


def apart(case: Case, name: str, values: Tensor) -> Iterator[tuple[tuple[str], Tensor]]:
    """One expert after another of those that a rank has in one tensor, by the name that an expert
    alone has."""
    own = case.model.experts // case.ep
    first = core("parallel_state").get_expert_model_parallel_rank() * own
    if one := re.fullmatch(r"(.*\.experts\.)(linear_fc\d\.weight)(\d+)", name):
        yield (f"{one[1]}local_experts.{one[3]}.{one[2]}",), values
    elif one := re.fullmatch(
        r"(.*\.experts\.)weight(\d)", name
    ):  # as GroupedMLP.forward takes them apart
        hidden = case.model.hidden
        for e, matrix in enumerate(
            values.view((own, hidden, -1) if one[2] == "1" else (own, -1, hidden))
        ):
            yield (f"{one[1]}local_experts.{first + e}.linear_fc{one[2]}.weight",), matrix.t()
    else:
        yield (name,), values


CASES = [
    Case("llama-tied", pp=2, dp=2, bucket=3000),
    Case("gpt2", pp=2, virtual=2, dp=2, bucket=2000, changes={"n_layer": 4}),
    Case("gpt2-untied", tp=2, way="fused"),
    Case("mixtral", tp=2, ep=2, dp=2, bucket=4000, changes={"num_local_experts": 4}),
    Case("mixtral", ep=3, dp=3, way="packed"),
]
SLOW = [
    Case("llama", tp=2, pp=2, dp=2, bucket=2000),
    Case("mixtral", tp=2, way="grouped"),
    Case("mixtral", pp=2, ep=2, dp=2, virtual=2, bucket=4000, changes=FOUR | {"num_local_experts": 4}),
    Case("mixtral", tp=2, ep=4, expert_tp=1, dp=2, way="packed", changes={"num_local_experts": 4}),
    Case("mixtral", ep=2, expert_tp=2, dp=4, changes={"num_local_experts": 4}),
    Case("mixtral", tp=2, expert_tp=1, dp=2),
    Case("mixtral", dp=2, way="packed"),
    Case("mixtral", tp=2, dp=2, ep=2, way="grouped", changes={"num_local_experts": 4}),
    Case("llama", pp=2, options={"decoder_first_pipeline_num_layers": 1}, changes=FOUR),
    Case("llama", pp=3, options={"decoder_last_pipeline_num_layers": 2}, changes=FOUR),
    Case("llama", pp=2, virtual=2, options={"account_for_embedding_in_pipeline_split": True,
         "account_for_loss_in_pipeline_split": True}, changes={"num_hidden_layers": 6}),
    Case("qwen3", tp=2, dp=2, way="fused", bucket=2000),
    Case("qwen2", tp=2, pp=2, virtual=3, dp=2, changes={"num_hidden_layers": 6}),
]  # fmt: skip


def check(case: Case, answers: list[list[Told]], folder: Path) -> None:
    """Of every element that Megatron's ranks hold, ours is the same; and each is held."""
    run(folder, folder.parent / "ours")
    ours = tensors(folder.parent / "ours")
    model = case.model
    known = {match.foreign: match for match in matches(megatron(case.fused, False, model), model)}
    seen: dict[tuple[str, str, int], Tensor] = {}
    for kind, name, number, of, values in (told for answer in answers for told in answer):
        match = known[
            "embedding.word_embeddings.weight"
            if model.tied and name == "output_layer.weight"
            else name
        ]
        wanted = cut_part(whole(ours, kind, match, model), match.cut, number, of, PADDED[case.tp])
        if match.cut == "vocabulary":
            rows = slice(max(0, model.vocab - number * len(wanted)))
        else:
            rows = slice(None)
        held = ~values[rows].isnan()
        assert torch.equal(values[rows][held], wanted[rows][held]), f"{kind} {name} {number}/{of}"
        key = kind, name, number
        seen[key] = seen.get(key, torch.zeros(held.shape, dtype=torch.bool)) | held
    assert all(values.all() for values in seen.values())
    assert {name for _, name, _ in seen} - {"output_layer.weight"} == known.keys() - {
        "output_layer.weight"
    }
    assert open_source(folder.parent / "ours").facts.steps == STEPS


def whole(ours: Mapping[str, Tensor], kind: str, match: Match, model: ModelConfig) -> Tensor:
    return match.how.join([ours[f"{kind}/{name}"] for name in match.logical], head_sizes(model))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", [*CASES, *slow(*((case,) for case in SLOW))], ids=str)
def test_masters_and_moments_are_those_that_megatron_holds(case: Case, tmp_path: Path) -> None:
    axes = {"tp": case.tp, "pp": case.pp, "dp": case.dp}
    check(
        case, run_ranks(save, axes, case=case, folder=tmp_path / "megatron"), tmp_path / "megatron"
    )
