"""Experts as megatron-core has them: one by one, packed into two tensors, grouped; in both of its
formats."""

import argparse
import importlib
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.convert.test_megatron import (
    PADDED,
    build,
    core,
    pretend_there_is_a_gpu,
    run,
    save_in_chunks,
)
from tests.convert.test_megatron_distributed import STEPS, optimizer_of, stepped
from tests.other_systems import CONFIGS, FOR_MEGATRON, MEGATRON, NEEDS_MEGATRON, slow, write_folder
from tests.ranks import run_ranks
from tests.runs import tensors
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of
from tools.convert.megatron.layout import rank_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of megatron-core
    pytest.mark.usefixtures("torch_files_read_here"),
    NEEDS_MEGATRON,
]
PRELOADED = MEGATRON
CHANGES = {"num_local_experts": 4, "num_hidden_layers": 2}
KINDS = {"param": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
METADATA: dict[str, dict[str, bool]] = {  # what Megatron is told to stack
    "layers and experts": {},
    "experts": {"non_homogeneous_layers": True},
    "nothing": {"singleton_local_shards": True},
}


@dataclass(frozen=True)
class Case:
    """way: how a rank has its experts: one by one, packed (GroupedMLP) or grouped (TEGroupedMLP).

    stacked: what a distributed checkpoint stacks; None for files by rank. zero: Megatron's
        distributed optimizer.
    """

    way: str
    stacked: str | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1
    zero: bool = False

    @property
    def world(self) -> dict[str, int]:
        """Axes of the mesh; ep lies within tp and dp."""
        return {"tp": self.tp, "pp": self.pp, "dp": max(1, self.ep * self.expert_tp // self.tp)}


CASES = [
    Case("one by one", "layers and experts", ep=2),
    Case("packed", "layers and experts", tp=2, expert_tp=2, zero=True),
    Case("grouped", "experts", tp=2, ep=2),
    Case("packed", "nothing", ep=2),
    Case("packed", ep=2),
    Case("one by one", tp=2, ep=2),
]
SLOW = [
    Case("one by one", "nothing", tp=2, expert_tp=2),
    Case("one by one", "experts", pp=2, zero=True),
    Case("one by one", "layers and experts", tp=2, zero=True),
    Case("one by one", "layers and experts", expert_tp=2),
    Case("packed", "experts", pp=2, ep=2, zero=True),
    Case("packed", ep=2, zero=True),
    Case("packed", tp=2, expert_tp=2),
    Case("packed", tp=2, ep=2),
    Case("grouped", "layers and experts", tp=2, expert_tp=2, zero=True),
    Case("grouped", "nothing", ep=2),
    Case("grouped", tp=2, expert_tp=2),
]


class _Anything(types.ModuleType):
    """Stands for Transformer Engine, which needs a GPU: any module of it, any class that Megatron
    derives from."""

    __version__ = "1.13.0"
    __path__: Any = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name[0].isupper():
            made = type(name, (nn.Module,), {})
        else:
            made = _Anything(f"{self.__name__}.{name}")
        if isinstance(made, types.ModuleType):
            sys.modules[made.__name__] = made
        setattr(self, name, made)
        return made


class _LayerNormLinear(nn.Module):
    """The parameters that Transformer Engine's class of this name has, in its order. Megatron's own
    code saves them."""

    fp8_meta: ClassVar[dict[str, bool]] = {"fp8_checkpoint": False}
    fp8 = False
    fp8_calibration = False

    def __init__(self, in_features: int, out_features: int, tp_size: int, **options: Any) -> None:
        super().__init__()
        dtype = options["params_dtype"]
        rows = out_features // tp_size
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=dtype))
        if options["normalization"] == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=dtype))
        self.weight = nn.Parameter(torch.randn(rows, in_features).to(dtype))
        if options["bias"]:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype))
        else:
            self.bias = torch.empty(0)
        for p in (self.weight, *([self.bias] if options["bias"] else ())):
            p.tensor_model_parallel = True  # type: ignore[attr-defined]

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


class _GroupedLinear(nn.Module):
    """The parameters that Transformer Engine's class of this name has. Megatron's own code saves
    them."""

    fp8_meta: ClassVar[dict[str, bool]] = {"fp8_checkpoint": False}
    fp8 = False
    fp8_calibration = False

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, tp_size: int, **options: Any
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.use_bias = options["bias"]
        assert tp_size == 1, "Megatron cuts experts itself"
        for n in range(num_gemms):
            weight = torch.randn(out_features, in_features).to(options["params_dtype"])
            self.register_parameter(f"weight{n}", nn.Parameter(weight))

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def specify(way: str, layer: Any) -> None:
    """Puts experts of this kind into Megatron's specification of a layer; "grouped" and "fused": by
    Transformer Engine, whose linear layers have the norms before them."""
    experts = core("transformer.moe.experts")
    spec = core("transformer.spec_utils").ModuleSpec
    if way == "packed":
        core(
            "transformer.moe.grouped_gemm_util"
        ).grouped_gemm = True  # which only its products need
        layer.submodules.mlp.submodules.experts = spec(module=experts.GroupedMLP)
    if way not in ("grouped", "fused"):
        return
    theirs = with_transformer_engine()
    fuse_norms(layer, theirs.TELayerNormColumnParallelLinear)
    if way == "grouped":
        parts = core("transformer.mlp").MLPSubmodules(
            linear_fc1=theirs.TEColumnParallelGroupedLinear,
            linear_fc2=theirs.TERowParallelGroupedLinear,
        )
        layer.submodules.mlp.submodules.experts = spec(
            module=experts.TEGroupedMLP, submodules=parts
        )


def with_transformer_engine() -> Any:
    """Megatron's module of layers that derive from Transformer Engine's."""
    engine = _Anything("transformer_engine")
    engine.pytorch.GroupedLinear = _GroupedLinear
    engine.pytorch.LayerNormLinear = _LayerNormLinear
    sys.modules["transformer_engine"] = engine
    _ = engine.pytorch.fp8, engine.pytorch.distributed, engine.common.recipe
    return importlib.reload(core("extensions.transformer_engine"))


def fuse_norms(layer: Any, linear: type) -> None:
    """As Megatron's specification with Transformer Engine has a layer: the norm before experts
    alone stands alone."""
    nothing = core("transformer.identity_op").IdentityOp
    layer.submodules.input_layernorm = nothing
    layer.submodules.self_attention.submodules.linear_qkv = linear
    layer.submodules.sharded_state_dict_keys_map = {}
    if hasattr(layer.submodules.mlp.submodules, "linear_fc1"):
        layer.submodules.pre_mlp_layernorm = nothing
        layer.submodules.mlp.submodules.linear_fc1 = linear


def save(mesh: DeviceMesh, case: Case, folder: Path) -> list[tuple[str, int, str, Tensor]]:
    """Two steps over bf16 weights, saved by Megatron; (kind, layer, tensor, values) of what the
    rank has of experts, and of an attention's product besides, by plain AdamW. The tensor says
    which part it is, of how many."""
    pretend_there_is_a_gpu()
    model = build(
        "mixtral",
        case.tp,
        case.pp,
        torch.bfloat16,
        case.ep,
        case.expert_tp,
        lambda s: specify(case.way, s),
        **CHANGES,
    )
    optimizer = optimizer_of([model], case.zero)
    expected = stepped(model, optimizer)
    args = args_of(from_hugging_face({**CONFIGS["mixtral"], **CHANGES}), PADDED[case.tp], case.tp, case.pp, False,
                   torch.bfloat16)  # fmt: skip
    args |= {"expert_model_parallel_size": case.ep, "expert_tensor_parallel_size": case.expert_tp}
    common = {
        "args": argparse.Namespace(**args, iteration=STEPS),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
    }
    if case.stacked:
        save_in_chunks(common | sharded(case, model, optimizer), folder / f"iter_{STEPS:07d}")
    else:
        save_by_rank(
            case, folder, {**common, "model": model.state_dict_for_save_checkpoint()}, optimizer
        )
    return list(told(model, expected, case))


def sharded(case: Case, model: Any, optimizer: Any) -> dict[str, Any]:
    group = core("parallel_state").get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {**METADATA[case.stacked or ""], "dp_cp_group": group}
    if case.zero:
        metadata |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        metadata |= {"distrib_optim_fully_reshardable_mem_efficient": True}  # by gloo, not NCCL
    state = model.sharded_state_dict(metadata=metadata)
    return {**state, "optimizer": optimizer.sharded_state_dict(state, metadata=metadata)}


def save_by_rank(case: Case, folder: Path, content: dict[str, Any], optimizer: Any) -> None:
    t, p, e = coordinates()
    place = folder / f"iter_{STEPS:07d}" / rank_folder(t, p, case.pp, e, case.ep)
    place.mkdir(parents=True, exist_ok=True)
    if case.zero:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if core("parallel_state").get_expert_data_parallel_rank() == 0:
        torch.save({**content, "optimizer": optimizer.state_dict()}, place / "model_optim_rng.pt")
    dist.barrier()


def coordinates() -> tuple[int, int, int]:
    """This rank's along tp, pp and ep."""
    ranks = core("parallel_state")
    t, p, e = (
        getattr(ranks, f"get_{axis}_model_parallel_rank")()
        for axis in ("tensor", "pipeline", "expert")
    )
    return t, p, e


def told(
    model: Any, expected: dict[str, Tensor], case: Case
) -> Iterator[tuple[str, int, str, Tensor]]:
    t, p, e = coordinates()
    own = CHANGES["num_local_experts"] // case.ep
    hidden = model.config.hidden_size
    part = core("parallel_state").get_expert_tensor_parallel_rank()
    for key, values in expected.items():
        name, kind = key.split()
        if not (layer := re.match(r"decoder\.layers\.(\d+)\.(.*)", name)):
            continue
        n = int(layer[1]) + p * CHANGES["num_hidden_layers"] // case.pp
        rest = layer[2]
        if rest == "self_attention.linear_proj.weight":
            yield KINDS[kind], n, f"attention {t}/{case.tp}", values
        elif one := re.fullmatch(
            r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight", rest
        ):
            yield (
                KINDS[kind],
                n,
                f"{one[2]} {part}/{case.expert_tp} {int(one[1]) + e * own}",
                values,
            )
        elif one := re.fullmatch(r"mlp\.experts\.linear_(fc[12])\.weight(\d+)", rest):
            yield (
                KINDS[kind],
                n,
                f"{one[1]} {part}/{case.expert_tp} {int(one[2]) + e * own}",
                values,
            )
        elif one := re.fullmatch(
            r"mlp\.experts\.weight([12])", rest
        ):  # as GroupedMLP.forward takes them apart
            matrices = values.view((own, hidden, -1) if one[1] == "1" else (own, -1, hidden))
            for number, matrix in enumerate(matrices):
                yield (
                    KINDS[kind],
                    n,
                    f"fc{one[1]} {part}/{case.expert_tp} {number + e * own}",
                    matrix.t(),
                )


def logical(ours: dict[str, Tensor], kind: str, layer: int, tensor: str) -> Tensor:
    """The part that a rank of Megatron's has, by what its layers do: columns first, then rows."""
    which, part, *expert = tensor.split()
    number, parts = map(int, part.split("/"))
    prefix = f"{kind}/layers.{layer}."
    if which == "attention":
        return ours[f"{prefix}attention.output.weight"].chunk(parts, 1)[number]
    prefix += f"mlp.experts.{expert[0]}."
    if which == "fc2":
        return ours[f"{prefix}down.weight"].chunk(parts, 1)[number]
    return torch.cat(
        [ours[f"{prefix}{half}.weight"].chunk(parts)[number] for half in ("gate", "up")]
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", [*CASES, *slow(*((case,) for case in SLOW))], ids=str)
def test_experts_are_read_with_masters_and_moments_however_they_are_kept(
    case: Case, tmp_path: Path
) -> None:
    answers = run_ranks(save, case.world, case=case, folder=tmp_path / "megatron")
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text(f"{STEPS}")
    run(tmp_path / "megatron", tmp_path / "ours")
    ours = tensors(tmp_path / "ours")
    seen = set()
    for kind, layer, tensor, values in (told for answer in answers for told in answer):
        at = f"{kind} {layer} {tensor}"
        torch.testing.assert_close(
            logical(ours, kind, layer, tensor), values, rtol=1e-5, atol=1e-7, msg=at
        )
        seen.add(at)
    experts = CHANGES["num_local_experts"]
    assert len(seen) == 3 * CHANGES["num_hidden_layers"] * (case.tp + 2 * case.expert_tp * experts)
    assert (
        len({values.flatten()[0].item() for *_, tensor, values in answers[0] if "fc" in tensor})
        > experts
    )


def fuse_as_transformer_engine(layer: Any) -> None:
    """As its specification has latents and both kinds of layers
    (`get_gpt_layer_with_transformer_engine_spec`)."""
    linear = with_transformer_engine().TELayerNormColumnParallelLinear
    nothing = core("transformer.identity_op").IdentityOp
    attention = layer.submodules.self_attention.submodules
    if hasattr(attention, "linear_kv_up_proj"):
        attention.linear_q_up_proj = attention.linear_kv_up_proj = linear
        attention.q_layernorm = attention.kv_layernorm = nothing
    else:
        attention.linear_qkv = linear
        layer.submodules.input_layernorm = nothing
    if hasattr(layer.submodules.mlp.submodules, "linear_fc1"):
        layer.submodules.mlp.submodules.linear_fc1 = linear
        layer.submodules.pre_mlp_layernorm = nothing


def registered(mesh: DeviceMesh, kinds: list[str]) -> dict[str, list[str]]:
    """Names of the parameters that the optimizer numbers."""
    found = {}
    for kind in kinds:
        model = build(kind, 1, 1, respecify=fuse_as_transformer_engine)
        found[kind] = [name for name, _ in model.named_parameters()]
        core("parallel_state").destroy_model_parallel()
    return found


@pytest.mark.slow
def test_names_with_transformer_engine_are_written_in_the_order_of_its_parameters(
    tmp_path: Path,
) -> None:
    kinds = ["deepseek_v2", "deepseek_v3", "glm4_moe"]
    (theirs,) = run_ranks(registered, {"dp": 1}, kinds=kinds)
    for kind in kinds:
        run(
            write_folder(tmp_path / kind, kind, **FOR_MEGATRON[kind]),
            tmp_path / f"to_{kind}",
            "--to",
            "megatron",
        )
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(
                tmp_path / f"to_{kind}/iter_0000000/mp_rank_00/model_optim_rng.pt",
                weights_only=True,
            )
        assert [name for name in content["model"] if not name.endswith("expert_bias")] == theirs[
            kind
        ], kind
