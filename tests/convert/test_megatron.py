"""Against the real megatron-core: its own modules load what we write, compute our logits, and write
what we read."""

import argparse
import contextlib
import functools
import importlib
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.other_systems import (
    CONFIGS,
    FOR_MEGATRON,
    MEGATRON,
    NEEDS_MEGATRON,
    megatrons,
    slow,
    usually,
    write_folder,
)
from tests.ranks import run_ranks
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of
from tools.convert.verify import load_stage

pytestmark = [pytest.mark.filterwarnings("ignore"), NEEDS_MEGATRON]  # warnings of megatron-core
PRELOADED = MEGATRON
KINDS = [
    "gpt2",
    "gpt2-untied",
    "llama",
    "llama-tied",
    "llama-stretched",
    "qwen2",
    "qwen3",
    "mixtral",
]
KINDS += [
    "llama-yarn",
    "qwen3_moe-dense-layers",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v2-dense",
    "deepseek_v3",
    "gpt_oss",
]
PADDED = {1: 256, 2: 256, 4: 512}  # rows of the vocabulary with padding, by tp


def run(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def core(module: str) -> Any:
    """A module of megatron-core."""
    return importlib.import_module(f"megatron.core.{module}")


def build(
    kind: str,
    tp: int,
    pp: int,
    dtype: torch.dtype = torch.float32,
    ep: int = 1,
    expert_tp: int | None = None,
    respecify: Callable[[Any], None] = lambda spec: None,
    **changes: Any,
) -> Any:
    """The only chunk of `build_chunks`."""
    (model,) = build_chunks(kind, tp, pp, dtype, ep, expert_tp, respecify, **changes)
    return model


def build_chunks(
    kind: str,
    tp: int,
    pp: int,
    dtype: torch.dtype = torch.float32,
    ep: int = 1,
    expert_tp: int | None = None,
    respecify: Callable[[Any], None] = lambda spec: None,
    virtual: int = 1,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[Any]:
    """Megatron-core's GPTModel of a configuration, on this rank of a tp x pp x ep world, on the
    CPU, in its chunks.

    expert_tp: over how many ranks an expert is cut, if not tp. respecify: changes Megatron's
        specification of a layer.
    virtual: stages on each rank. options: more of Megatron's configuration. changes: of ours.
    """
    several = virtual if virtual > 1 else None
    on_the_cpu()
    core("parallel_state").initialize_model_parallel(
        tp, pp, several, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp
    )
    model = from_hugging_face({**megatrons(kind), **changes})
    a = argparse.Namespace(**args_of(model, PADDED[tp], tp, pp, False, dtype))
    options = {
        "expert_tensor_parallel_size": expert_tp,
        **expert_options(a),
        **latent_options(a),
        **(options or {}),
    }
    kind_of = "MLATransformerConfig" if a.multi_latent_attention else "TransformerConfig"
    config = getattr(core("transformer.transformer_config"), kind_of)(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_query_groups,
        kv_channels=a.kv_channels,
        ffn_hidden_size=a.ffn_hidden_size,
        gated_linear_unit=a.swiglu or a.quick_geglu,
        activation_func=activation_of(a),
        activation_func_clamp_value=a.activation_func_clamp_value,
        glu_linear_offset=a.glu_linear_offset,
        softmax_type=a.softmax_type,
        window_size=a.window_size,
        window_attn_skip_freq=a.window_attn_skip_freq,
        add_bias_linear=a.add_bias_linear,
        add_qkv_bias=a.add_qkv_bias,
        qk_layernorm=a.qk_layernorm,
        normalization=a.normalization,
        layernorm_epsilon=a.norm_epsilon,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=several,
        **options,
    )
    for name, said in YARN.items():
        setattr(config, name, getattr(a, said, None))
    specs = core("models.gpt.gpt_layer_specs")
    layers = specs.get_gpt_decoder_layer_specs(config, False, a.normalization)
    for layer in {id(layer): layer for layer in layers}.values():
        respecify(layer)
    return [_chunk(a, config, layers, v if several else None) for v in range(virtual)]


def on_the_cpu() -> None:
    """Megatron-core asks for a GPU without looking."""
    torch._dynamo.config.disable = (
        True  # theirs as it is written: compiling its small functions takes longer
    )
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    core("tensor_parallel.random").CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


# What GPTModel looks for in its configuration, and Megatron-LM's args of it.
YARN = {f"yarn_{name}": name for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
YARN |= {
    f"yarn_{name}": f"yarn_{name}"
    for name in (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "correction_range_round_to_int",
    )
}


def activation_of(a: argparse.Namespace) -> Any:
    if a.quick_geglu:
        return core("fusions.fused_bias_geglu").quick_gelu
    return torch.nn.functional.silu if a.swiglu else gelu


def expert_options(a: argparse.Namespace) -> dict[str, Any]:
    names = (
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
    )
    names += (
        "moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor "
        "moe_router_num_groups "
    )
    names += "moe_router_group_topk moe_router_enable_expert_bias"
    plain = {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
    plain |= {"moe_router_dtype": "fp32", "perform_initialization": a.softmax_type == "vanilla"}
    return {
        "num_moe_experts": a.num_experts,
        **plain,
        **{name: getattr(a, name) for name in names.split()},
    }


def latent_options(a: argparse.Namespace) -> dict[str, Any]:
    if not a.multi_latent_attention:
        return {}
    without_transformer_engine()
    names = (
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim rope_type "
    )
    names += (
        "rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings "
        "beta_fast beta_slow "
    )
    names += "mscale mscale_all_dim"
    return {name: getattr(a, name) for name in names.split() if hasattr(a, name)}


def without_transformer_engine() -> None:
    """Multi-latent attention tells its core the widths of keys and values, which only Transformer
    Engine's takes."""
    attention = core("transformer.dot_product_attention").DotProductAttention
    if not hasattr(attention, "takes_widths"):
        made = attention.__init__
        attention.takes_widths = True
        attention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **options: made(
            self, *a, **options
        )
    core("transformer.multi_latent_attention").HAVE_TE = False


def _chunk(a: argparse.Namespace, config: Any, layers: list[Any], virtual: int | None) -> Any:
    """The model of one virtual stage, or of the stage if it has no such."""
    ranks = core("parallel_state")
    block = core("transformer.transformer_block")
    first = core("transformer.transformer_layer").get_transformer_layer_offset(
        config, vp_stage=virtual
    )
    own = layers[first : first + block.get_num_layers_to_build(config, vp_stage=virtual)]
    norm = core("models.gpt.gpt_layer_specs").LNImpl
    return core("models.gpt").GPTModel(
        config,
        block.TransformerBlockSubmodules(layer_specs=own, layer_norm=norm),
        vocab_size=a.padded_vocab_size,
        max_sequence_length=a.max_position_embeddings,
        pre_process=ranks.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=ranks.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        position_embedding_type=a.position_embedding_type,
        rotary_base=a.rotary_base,
        rotary_percent=a.rotary_percent,
        rope_scaling=a.use_rope_scaling,
        rope_scaling_factor=a.rope_scaling_factor,
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        parallel_output=False,
        vp_stage=virtual,
    )


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def place(mesh: DeviceMesh, pp: int) -> str:

    stage = f"_{core('parallel_state').get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    return f"mp_rank_{core('parallel_state').get_tensor_model_parallel_rank():02d}{stage}/model_optim_rng.pt"


def load(mesh: DeviceMesh, kind: str, folder: Path, tp: int, pp: int) -> Tensor | None:
    """Loads our files strictly, as Megatron does; returns the logits if this rank has all
    layers."""
    # it has biases only of uncut experts
    model = build(kind, tp, pp, expert_tp=1 if kind == "gpt_oss" else None)
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(folder / "iter_0000000" / place(mesh, pp), weights_only=True)
    model.eval().load_state_dict(content["model"], strict=True)
    assert {n for n, v in model.state_dict().items() if v is not None} == content["model"].keys()
    trained = [name for name in content["model"] if not name.endswith("expert_bias")]
    assert [n for n, _ in model.named_parameters()] == trained  # the optimizer counts on the order
    if pp > 1:
        return None
    core(
        "transformer.moe.moe_utils"
    ).te_general_gemm = None  # it asks for Transformer Engine's without looking
    core("fusions.fused_softmax").get_sliding_window_causal_mask = windowed
    ids = ids_of()
    s = ids.shape[1]
    positions = torch.arange(s)[None].expand(len(ids), -1)
    future = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(ids, positions, future)[..., :131]


def windowed(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Theirs makes it on a GPU: True where nothing is seen."""
    ones = torch.ones(queries, keys, dtype=torch.bool)
    return ~ones.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def ids_of() -> Tensor:
    return torch.randint(131, (2, 20), generator=torch.Generator().manual_seed(4))


@pytest.mark.cases(0, sample=1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize("kind", usually(("deepseek_v3", "llama-tied"), KINDS))
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), *slow((1, 1), (4, 1), (1, 2), (2, 2))])
def test_megatrons_own_modules_load_what_we_write_and_compute_our_logits(
    kind: str, tp: int, pp: int, tmp_path: Path
) -> None:
    hf = write_folder(tmp_path / "hf", kind, **FOR_MEGATRON.get(kind, {}))
    run(hf, tmp_path / "megatron", "--to", "megatron", "--tp", tp, "--pp", pp, "--layers", "local")
    answers = run_ranks(
        load, {"tp": tp, "pp": pp}, kind=kind, folder=tmp_path / "megatron", tp=tp, pp=pp
    )
    ours = load_stage(open_source(hf))(ids_of().t()).transpose(0, 1)
    for logits in answers if pp == 1 else ():
        torch.testing.assert_close(
            logits, ours, rtol=0, atol=1e-5 * max(1.0, ours.abs().max().item())
        )


def save(mesh: DeviceMesh, kind: str, folder: Path, tp: int, pp: int, dtype: torch.dtype) -> None:
    """A checkpoint as Megatron-LM's own code lays it out, with the state of its own optimizer after
    two steps."""

    pretend_there_is_a_gpu()
    model = build(kind, tp, pp, dtype)
    args = args_of(from_hugging_face(CONFIGS[kind]), PADDED[tp], tp, pp, False, dtype)
    save_trained(model, args, folder / "iter_0000002" / place(mesh, pp), dtype)


def save_trained(model: Any, args: dict[str, Any], file: Path, dtype: torch.dtype) -> None:
    """Takes two steps of Megatron's own optimizer and saves this rank's file."""
    if dtype == torch.bfloat16:
        wrapped = core("transformer.module").Float16Module(model.config, model)
    else:
        wrapped = model
    wrapped.ddp_config = core("distributed").DistributedDataParallelConfig()
    settings = core("optimizer").OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=dtype == torch.bfloat16, params_dtype=dtype, clip_grad=0.0
    )
    optimizer = core("optimizer").get_megatron_optimizer(settings, [wrapped])
    for n in range(2):
        for p in model.parameters():
            dice = torch.Generator().manual_seed(n)
            gradient = torch.randn(p.shape, generator=dice)
            p.main_grad = gradient
            p.grad = gradient.to(p.dtype)
        optimizer.step()
    content = {
        "args": argparse.Namespace(**args, iteration=2),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
    }
    file.parent.mkdir(parents=True)
    torch.save(content, file)
    dist.barrier()


def pretend_there_is_a_gpu() -> None:
    """Megatron's optimizer makes numbers on a GPU, and tells half parameters by the type that
    tensors have there."""
    kind_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: _as_cuda(kind_of(self, *a, **k))  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "ones", "empty", "zeros_like"):
        setattr(torch, name, functools.partial(_on_cpu, getattr(torch, name)))


def _on_cpu(make: Any, *sizes: Any, **options: Any) -> Tensor:
    return make(
        *sizes, **(options | {"device": "cpu"} if options.get("device") == "cuda" else options)
    )


def _as_cuda(said: Any) -> Any:
    if isinstance(said, str) and "cuda" not in said:
        return said.replace("torch.", "torch.cuda.", 1)
    return said


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gpt2", torch.bfloat16),
        ("llama", torch.float32),
        *slow(("gpt2", torch.float32), ("llama", torch.bfloat16)),
    ],
)
def test_what_megatrons_own_modules_and_optimizer_save_is_read_with_its_state(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rotary rows and vocabulary pieces are distinct per rank, so a wrong order cannot come back
    the same."""
    run_ranks(save, {"tp": 2}, kind=kind, folder=tmp_path / "megatron", tp=2, pp=1, dtype=dtype)
    same_on_the_way_back(tmp_path, dtype, "--layers", "local")


def same_on_the_way_back(tmp_path: Path, dtype: torch.dtype, *options: str) -> None:
    """Converts what two ranks saved and back: the same tensors in the same order, with their
    state."""
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text("2")
    run(tmp_path / "megatron", tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "back", "--to", "megatron", "--tp", 2, *options, "--dtype",
        "bf16" if dtype == torch.bfloat16 else "fp32")  # fmt: skip
    for rank in range(2):
        theirs, ours = (_content(tmp_path / folder, rank) for folder in ("megatron", "back"))
        named = {n: v for n, v in theirs["model"].items() if v is not None}
        assert list(named) == list(ours["model"])
        assert all(_equal(n, named[n], ours["model"][n], rank) for n in named)
        inner, again = (o.get("optimizer", o) for o in (theirs["optimizer"], ours["optimizer"]))
        assert [g["params"] for g in inner["param_groups"]] == [
            g["params"] for g in again["param_groups"]
        ]
        assert [g["wd_mult"] for g in inner["param_groups"]] == [
            g["wd_mult"] for g in again["param_groups"]
        ]
        for number, state in inner["state"].items():
            for moment in ("exp_avg", "exp_avg_sq"):
                assert _equal("", state[moment], again["state"][number][moment], rank)
            assert float(state["step"]) == again["state"][number]["step"] == 2
        groups = [
            content["optimizer"].get("fp32_from_fp16_params", []) for content in (theirs, ours)
        ]
        assert sum(map(len, groups[0])) == (len(named) if dtype == torch.bfloat16 else 0)
        masters = ([master for group in held for master in group] for held in groups)
        assert all(_equal("", one, other, rank) for one, other in zip(*masters, strict=True))


def _content(folder: Path, rank: int) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(
            folder / f"iter_0000002/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=True
        )


def _equal(name: str, one: Tensor, other: Tensor, rank: int) -> bool:
    """But for the padding of the vocabulary, which is not kept."""
    if len(one) == PADDED[2] // 2:
        real = min(max(131 - rank * PADDED[2] // 2, 0), PADDED[2] // 2)
        one = one[:real]
        other = other[:real]
    return torch.equal(one, other)


def save_in_chunks(state: dict[str, Any], folder: Path) -> None:
    """By Megatron's own code; this rank's part of a distributed checkpoint."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it writes in children
    writer = core("dist_checkpointing.strategies.filesystem_async")
    # else a new interpreter serves it
    writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    core("dist_checkpointing").save(state, str(folder))


def save_distributed(
    mesh: DeviceMesh, kind: str, folder: Path, tp: int, pp: int
) -> dict[str, Tensor]:
    """What Megatron saves by default now (torch_dist); returns this rank's tensors."""

    model = build(kind, tp, pp)
    args = args_of(from_hugging_face(megatrons(kind)), PADDED[tp], tp, pp, False, torch.float32)
    state = {**model.sharded_state_dict(), "args": argparse.Namespace(**args), "iteration": 5}
    save_in_chunks(state, folder)
    return {n: v for n, v in model.state_dict().items() if v is not None}


@pytest.mark.cases(0, 1)
@pytest.mark.usefixtures("torch_files_read_here")
@pytest.mark.parametrize("kind", ["gpt2", "llama", *slow(("deepseek_v3",), ("glm4_moe",))])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_distributed_checkpoint_of_megatrons_own_is_read(
    kind: str, tp: int, pp: int, tmp_path: Path
) -> None:
    held = run_ranks(
        save_distributed, {"tp": tp, "pp": pp}, kind=kind, folder=tmp_path / "dist", tp=tp, pp=pp
    )
    run(
        tmp_path / "dist",
        tmp_path / "legacy",
        "--to",
        "megatron",
        "--tp",
        tp,
        "--pp",
        pp,
        "--layers",
        "local",
    )
    for rank in range(tp * pp):
        folder = f"mp_rank_{rank % tp:02d}" + (f"_{rank // tp:03d}" if pp > 1 else "")
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(
                tmp_path / f"legacy/iter_0000005/{folder}/model_optim_rng.pt", weights_only=True
            )
        assert content["model"].keys() == held[rank].keys()
        for name, values in content["model"].items():
            if "embeddings" in name:
                real = max(0, min(len(values), 131 - (rank % tp) * len(values)))
            else:
                real = len(values)
            if not name.startswith("output"):
                real = real
            else:
                real = max(0, min(len(values), 131 - (rank % tp) * len(values)))
            assert torch.equal(values[:real], held[rank][name][:real]), name
