"""Hybrid models against the real megatron-core: its own modules load what we write, compute our
logits, and write what we read.

Transformer Engine, mamba_ssm and flash-linear-attention need a GPU. In their place stand plain
layers: a norm and a linear layer in one, a gated norm, and recurrences token by token in float64.
All else is megatron-core's, the names and parts of tensors too.
"""

import argparse
import sys
import types
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from tests.convert.test_megatron import (
    PADDED,
    core,
    on_the_cpu,
    place,
    pretend_there_is_a_gpu,
    run,
    same_on_the_way_back,
    save_in_chunks,
    save_trained,
)
from tests.convert.test_megatron_buckets import Case, Told, check, save_chunks
from tests.other_systems import (
    FOR_MEGATRON,
    MEGATRON,
    NEEDS_MEGATRON,
    megatrons,
    slow,
    write_folder,
)
from tests.ranks import run_ranks
from tools.convert.formats import open_source
from tools.convert.hf.config import differing_fields, from_hugging_face
from tools.convert.megatron.args import args_of
from tools.convert.megatron.hybrid_layers import allocated
from tools.convert.megatron.layout import rank_folder
from tools.convert.verify import load_stage

pytestmark = [pytest.mark.filterwarnings("ignore"), NEEDS_MEGATRON]  # warnings of megatron-core
PRELOADED = MEGATRON
KIND = "nemotron_h"
VOCAB = 131
BY_NAME = "fully_reshardable"  # the distributed optimizer's state under the names of weights
INFERENCE = "megatron.core.inference.contexts.attention_context.triton"
PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}


def with_stand_ins() -> None:
    """Put plain layers in the place of kernels, before megatron-core's modules look for them."""
    norm = types.ModuleType("mamba_ssm.ops.triton.layernorm_gated")
    norm.RMSNorm = GroupNorm  # type: ignore[attr-defined]
    scan = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    scan.mamba_chunk_scan_combined = None  # type: ignore[attr-defined]
    scan.mamba_split_conv1d_scan_combined = mixed  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules[name] = types.ModuleType(name)
    # of generation, by Triton
    inference = types.ModuleType(f"{INFERENCE}.tensor_ops")
    for name in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(inference, name, None)
    sys.modules[inference.__name__] = inference
    sys.modules[norm.__name__] = norm
    sys.modules[scan.__name__] = scan
    core("ssm.mamba_block").TENorm = core("transformer.torch_norm").WrappedTorchNorm


class GroupNorm(nn.Module):
    """mamba_ssm's RMSNorm of groups of features, without a gate."""

    def __init__(
        self, features: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype))
        self.eps = eps
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        normalized = F.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normalized.flatten(-2) * self.weight


def mixed(
    zxbcdt: Tensor,
    kernel: Tensor,
    kernel_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    **settings: Any,
) -> Tensor:
    """mamba_ssm's mamba_split_conv1d_scan_combined, token by token in float64 [b, s, ...]."""
    assert settings["activation"] == "silu" and not settings["norm_before_gate"]
    headdim = settings["headdim"]
    ngroups = settings["ngroups"]
    heads = len(A)
    width = heads * headdim
    keys = (zxbcdt.shape[-1] - 2 * width - heads) // 2
    z, xbc, dt = zxbcdt.double().split([width, width + 2 * keys, heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (kernel.shape[1] - 1, 0))
    weight = kernel.double().unsqueeze(1)
    convolved = F.conv1d(padded, weight, kernel_bias.double(), groups=len(kernel))
    x, b, c = F.silu(convolved.transpose(1, 2)).split([width, keys, keys], -1)
    x = x.unflatten(-1, (heads, headdim))
    b = b.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2)
    c = c.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2)
    dt = F.softplus(dt + dt_bias.double())
    state = torch.zeros(*x.shape[:1], heads, headdim, b.shape[-1], dtype=torch.float64)
    read = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A.double()).exp()[..., None, None]
        written = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = decay * state + written
        read.append((state * c[:, t, :, None]).sum(-1) + D.double()[:, None] * x[:, t])
    gated = torch.stack(read, 1).flatten(2) * F.silu(z)
    return gated.to(zxbcdt.dtype)


def normed_linear() -> Any:
    """Transformer Engine's LayerNormLinear: an RMSNorm and a linear layer, which registers its
    norm first."""

    class NormedLinear(core("tensor_parallel.layers").ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, *, config: Any, **options: Any) -> None:
            super().__init__(inputs, outputs, config=config, **options)
            weight = self._parameters.pop("weight")
            self.layer_norm_weight = nn.Parameter(torch.ones(inputs, dtype=config.params_dtype))
            self._parameters["weight"] = weight

        def forward(self, x: Tensor, *others: Any, **options: Any) -> Any:
            eps = self.config.layernorm_epsilon
            normalized = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, eps)
            return super().forward(normalized, *others, **options)

    return NormedLinear


def build(model: ModelConfig, tp: int, pp: int, dtype: torch.dtype = torch.float32) -> Any:
    """Megatron-core's MambaModel on this rank of a tp x pp world, on the CPU."""
    on_the_cpu()
    with_stand_ins()
    ranks = core("parallel_state")
    ranks.initialize_model_parallel(tp, pp)
    a = argparse.Namespace(**args_of(model, PADDED[tp], tp, pp, True, dtype))
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_query_groups,
        kv_channels=a.kv_channels,
        ffn_hidden_size=a.ffn_hidden_size,
        activation_func=core("activations").squared_relu,
        add_bias_linear=a.add_bias_linear,
        normalization=a.normalization,
        layernorm_epsilon=a.norm_epsilon,
        is_hybrid_model=a.is_hybrid_model,
        mamba_num_heads=a.mamba_num_heads,
        mamba_head_dim=a.mamba_head_dim,
        mamba_state_dim=a.mamba_state_dim,
        mamba_num_groups=a.mamba_num_groups,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **PLAIN,
    )
    return core("models.mamba.mamba_model").MambaModel(
        config,
        stack_of_layers(),
        vocab_size=a.padded_vocab_size,
        max_sequence_length=a.max_position_embeddings,
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        hybrid_override_pattern=a.hybrid_override_pattern,
        position_embedding_type=a.position_embedding_type,
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        parallel_output=False,
    )


def stack_of_layers() -> Any:
    """mamba_stack_spec of megatron/core/models/mamba/mamba_layer_specs.py, of plain layers."""
    spec = core("transformer.spec_utils").ModuleSpec
    layer = core("transformer.transformer_layer")
    attention = core("transformer.attention")
    mixer = core("ssm.mamba_mixer")
    add = core("fusions.fused_bias_dropout").get_bias_dropout_add
    into = normed_linear()
    out = core("tensor_parallel.layers").RowParallelLinear
    of_mixer = mixer.MambaMixerSubmodules(in_proj=into, out_proj=out)
    of_attention = attention.SelfAttentionSubmodules(
        linear_qkv=into,
        core_attention=core("transformer.dot_product_attention").DotProductAttention,
        linear_proj=out,
    )
    of_mlp = core("transformer.mlp").MLPSubmodules(linear_fc1=into, linear_fc2=out)
    causal = {"attn_mask_type": core("transformer.enums").AttnMaskType.causal}
    layers = {
        "mamba_layer": spec(
            module=core("ssm.mamba_layer").MambaLayer,
            submodules=core("ssm.mamba_layer").MambaLayerSubmodules(
                mixer=spec(module=mixer.MambaMixer, submodules=of_mixer), mamba_bda=add
            ),
        ),
        "attention_layer": spec(
            module=layer.TransformerLayer,
            submodules=layer.TransformerLayerSubmodules(
                self_attention=spec(
                    module=attention.SelfAttention, params=causal, submodules=of_attention
                ),
                self_attn_bda=add,
            ),
        ),
        "mlp_layer": spec(
            module=core("ssm.mlp_layer").MLPLayer,
            submodules=layer.TransformerLayerSubmodules(
                mlp=spec(module=core("transformer.mlp").MLP, submodules=of_mlp), mlp_bda=add
            ),
        ),
    }
    block = core("ssm.mamba_block")
    return spec(module=block.MambaStack, submodules=block.MambaStackSubmodules(**layers))


def load(mesh: DeviceMesh, model: ModelConfig, folder: Path, tp: int, pp: int) -> Tensor | None:
    """Loads our files strictly, as Megatron does; returns the logits if this rank has all
    layers."""
    made = build(model, tp, pp)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(folder / "iter_0000000" / place(mesh, pp), weights_only=True)
    made.load_state_dict(content["model"], strict=True)
    # the optimizer counts on the order
    assert [name for name, _ in made.named_parameters()] == [*content["model"]]
    return None if pp > 1 else logits_of(made)


def logits_of(made: Any) -> Tensor:
    ids = ids_of()
    length = ids.shape[1]
    positions = torch.arange(length)[None].expand(len(ids), -1)
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return made.eval()(ids, positions, future)[..., :VOCAB]


def ids_of() -> Tensor:
    return torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2), (1, 1), (4, 1), (1, 2)])
def test_megatrons_own_hybrid_model_loads_what_we_write_and_computes_our_logits(
    tp: int, pp: int, tmp_path: Path
) -> None:
    hf = write_folder(tmp_path / "hf", KIND, **FOR_MEGATRON[KIND])
    run(hf, tmp_path / "megatron", "--to", "megatron", "--no-verify", "--tp", tp, "--pp", pp)
    model = from_hugging_face(megatrons(KIND))
    answers = run_ranks(
        load, {"tp": tp, "pp": pp}, model=model, folder=tmp_path / "megatron", tp=tp, pp=pp
    )
    ours = load_stage(open_source(hf))(ids_of().t()).transpose(0, 1)
    for logits in answers if pp == 1 else ():
        torch.testing.assert_close(logits, ours, rtol=0, atol=1e-5 * ours.abs().max().item())


RATIOS = [number / 20 for number in range(21)]


def compare_allocations(mesh: DeviceMesh) -> list[tuple[int, float, float]]:
    """Returns number of layers and ratios of which Megatron makes another pattern."""
    allocate = core("ssm.mamba_hybrid_layer_allocation").allocate_layers
    others = []
    for layers, attention, mlp in product(range(1, 40), RATIOS, RATIOS):
        if attention + mlp > 1:
            continue
        if "".join(allocate(layers, attention, mlp)) != allocated(layers, attention, mlp):
            others.append((layers, attention, mlp))
    return others


@pytest.mark.slow
def test_ratios_are_the_pattern_that_megatron_makes_of_them() -> None:
    (others,) = run_ranks(compare_allocations, {"dp": 1})
    assert not others


def save(mesh: DeviceMesh, model: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    pretend_there_is_a_gpu()
    made = build(model, 2, 1, dtype)
    args = args_of(model, PADDED[2], 2, 1, True, dtype)
    save_trained(made, args, folder / "iter_0000002" / place(mesh, 1), dtype)
    dist.barrier()


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_megatrons_own_hybrid_model_and_optimizer_save_is_read_with_its_state(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = from_hugging_face(megatrons(KIND))
    run_ranks(save, {"tp": 2}, model=model, folder=tmp_path / "megatron", dtype=dtype)
    same_on_the_way_back(tmp_path, dtype)


def save_in_buckets(mesh: DeviceMesh, case: Case, folder: Path) -> list[Told]:
    pretend_there_is_a_gpu()
    made = build(case.model, case.tp, case.pp, torch.bfloat16)
    return save_chunks(case, [made], folder)


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize(
    "case",
    [
        Case(KIND, tp=2, dp=2, way="fused", bucket=900, changes=FOR_MEGATRON[KIND]),
        Case(KIND, pp=2, dp=2, way="fused", changes=FOR_MEGATRON[KIND]),
        Case(KIND, tp=2, pp=2, way="fused", changes=FOR_MEGATRON[KIND], form=BY_NAME),
    ],
    ids=str,
)
def test_masters_and_moments_of_a_hybrid_model_are_those_that_megatron_holds(
    case: Case, tmp_path: Path
) -> None:
    axes = {"tp": case.tp, "pp": case.pp, "dp": case.dp}
    answers = run_ranks(save_in_buckets, axes, case=case, folder=tmp_path / "megatron")
    check(case, answers, tmp_path / "megatron")


DELTA = ModelConfig(
    family="qwen3_next",
    layers=4,
    hidden=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=40,
    vocab=VOCAB,
    max_positions=48,
    norm_unit_offset=False,
    rotary_fraction=0.5,
    delta_net={"key_heads": 2, "value_heads": 6, "key_dim": 5, "value_dim": 7, "kernel": 3},  # type: ignore[arg-type]
    delta_layers=(0, 2, 3),
    tied=False,
)


def build_delta(tp: int, pp: int, dtype: torch.dtype = torch.float32) -> Any:
    """Megatron-core's GPTModel with gated delta nets, on this rank of a tp x pp world."""
    on_the_cpu()
    net = core("ssm.gated_delta_net")
    net.HAVE_FLA = True
    net.l2norm = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    ranks = core("parallel_state")
    ranks.initialize_model_parallel(tp, pp)
    a = argparse.Namespace(**args_of(DELTA, PADDED[tp], tp, pp, True, dtype))
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_query_groups,
        kv_channels=a.kv_channels,
        ffn_hidden_size=a.ffn_hidden_size,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=a.add_bias_linear,
        qk_layernorm=a.qk_layernorm,
        attention_output_gate=a.attention_output_gate,
        normalization=a.normalization,
        layernorm_epsilon=a.norm_epsilon,
        experimental_attention_variant=a.experimental_attention_variant,
        linear_attention_freq=a.linear_attention_freq,
        linear_num_key_heads=a.linear_num_key_heads,
        linear_num_value_heads=a.linear_num_value_heads,
        linear_key_head_dim=a.linear_key_head_dim,
        linear_value_head_dim=a.linear_value_head_dim,
        linear_conv_kernel_dim=a.linear_conv_kernel_dim,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        deterministic_mode=True,
        **PLAIN,
    )
    block = core("transformer.transformer_block")
    first = core("transformer.transformer_layer").get_transformer_layer_offset(config)
    kinds = a.linear_attention_freq[first : first + block.get_num_layers_to_build(config)]
    norm = core("transformer.torch_norm").WrappedTorchNorm
    return core("models.gpt").GPTModel(
        config,
        block.TransformerBlockSubmodules(
            layer_specs=[delta_layer(bool(kind)) for kind in kinds], layer_norm=norm
        ),
        vocab_size=a.padded_vocab_size,
        max_sequence_length=a.max_position_embeddings,
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        position_embedding_type=a.position_embedding_type,
        rotary_base=a.rotary_base,
        rotary_percent=a.rotary_percent,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def delta_layer(has_net: bool) -> Any:
    """A layer of megatron/core/models/gpt/experimental_attention_variant_module_specs.py, of plain
    layers."""
    spec = core("transformer.spec_utils").ModuleSpec
    layer = core("transformer.transformer_layer")
    attention = core("transformer.attention")
    net = core("ssm.gated_delta_net")
    add = core("fusions.fused_bias_dropout").get_bias_dropout_add
    norm = core("transformer.torch_norm").WrappedTorchNorm
    into = normed_linear()
    out = core("tensor_parallel.layers").RowParallelLinear
    causal = {"attn_mask_type": core("transformer.enums").AttnMaskType.causal}
    mixer = spec(
        module=attention.SelfAttention,
        params=causal,
        submodules=attention.SelfAttentionSubmodules(
            linear_qkv=into,
            core_attention=core("transformer.dot_product_attention").DotProductAttention,
            linear_proj=out,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    if has_net:
        parts = net.GatedDeltaNetSubmodules(in_proj=into, out_norm=norm, out_proj=out)
        mixer = spec(module=net.GatedDeltaNet, submodules=parts)
    of_mlp = core("transformer.mlp").MLPSubmodules(linear_fc1=into, linear_fc2=out)
    return spec(
        module=layer.TransformerLayer,
        submodules=layer.TransformerLayerSubmodules(
            self_attention=mixer,
            self_attn_bda=add,
            mlp=spec(module=core("transformer.mlp").MLP, submodules=of_mlp),
            mlp_bda=add,
        ),
    )


def save_delta(
    mesh: DeviceMesh, folder: Path, tp: int, pp: int, dtype: torch.dtype
) -> Tensor | None:
    """Saves trained weights; returns the logits of a rank that has all layers."""
    pretend_there_is_a_gpu()
    made = build_delta(tp, pp, dtype)
    draw(made)
    args = args_of(DELTA, PADDED[tp], tp, pp, True, dtype)
    save_trained(made, args, folder / "iter_0000002" / place(mesh, pp), dtype)
    dist.barrier()
    return None if pp > 1 or dtype != torch.float32 else logits_of(made)


def draw(made: Any) -> None:
    """Draws weights by their names and ranks: Megatron leaves some as they lie in memory."""
    ranks = core("parallel_state")
    with torch.no_grad():
        for name, p in made.named_parameters():
            cut = getattr(p, "tensor_model_parallel", False)
            rank = ranks.get_tensor_model_parallel_rank() if cut else 0
            stage = ranks.get_pipeline_model_parallel_rank()
            dice = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank} {stage}".encode()))
            p.copy_(0.2 * torch.randn(p.shape, generator=dice) + float("norm" in name))


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_megatrons_own_gated_delta_nets_save_is_read_with_its_state(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    answers = run_ranks(
        save_delta, {"tp": 2}, folder=tmp_path / "megatron", tp=2, pp=1, dtype=dtype
    )
    same_on_the_way_back(tmp_path, dtype)
    source = open_source(tmp_path / "ours")
    assert not differing_fields(source.model, DELTA)
    ours = load_stage(source)(ids_of().t()).transpose(0, 1)
    for logits in answers if dtype == torch.float32 else ():
        torch.testing.assert_close(logits, ours, rtol=0, atol=1e-5 * ours.abs().max().item())


def save_delta_distributed(mesh: DeviceMesh, folder: Path, tp: int, pp: int) -> dict[str, Tensor]:
    """What Megatron saves by default (torch_dist); returns this rank's tensors."""
    made = build_delta(tp, pp)
    draw(made)
    args = argparse.Namespace(**args_of(DELTA, PADDED[tp], tp, pp, True, torch.float32))
    save_in_chunks({**made.sharded_state_dict(), "args": args, "iteration": 5}, folder)
    return {name: values for name, values in made.state_dict().items() if values is not None}


@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), *slow((1, 2))])
def test_a_distributed_checkpoint_with_gated_delta_nets_is_read(
    tp: int, pp: int, tmp_path: Path
) -> None:
    axes = {"tp": tp, "pp": pp}
    held = run_ranks(save_delta_distributed, axes, folder=tmp_path / "dist", tp=tp, pp=pp)
    run(tmp_path / "dist", tmp_path / "legacy", "--to", "megatron", "--tp", tp, "--pp", pp)
    for rank, theirs in enumerate(held):
        folder = rank_folder(rank % tp, rank // tp, pp)
        file = tmp_path / f"legacy/iter_0000005/{folder}/model_optim_rng.pt"
        with torch.serialization.safe_globals([argparse.Namespace]):
            ours = torch.load(file, weights_only=True)["model"]
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            real = len(values)
            if name.startswith(("embedding", "output")):
                real = min(max(VOCAB - rank % tp * real, 0), real)
            assert torch.equal(ours[name][:real], values[:real]), name
