"""The state of megatron-core's distributed optimizer, and its experts over several ranks, saved by
its own code."""

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.convert.test_megatron import PADDED, build, core, pretend_there_is_a_gpu, run
from tests.other_systems import MEGATRON, NEEDS_MEGATRON, megatrons, slow
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import tensors
from tools.cli import main
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.args import args_of
from tools.convert.megatron.layout import rank_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of megatron-core
    pytest.mark.usefixtures("torch_files_read_here"),
    NEEDS_MEGATRON,
]
PRELOADED = MEGATRON
LR = 1e-2
STEPS = 2
DECAY = 0.01
KINDS = ("param", "exp_avg", "exp_avg_sq")
# kind, tp, pp, ep, elements of a bucket (0: one bucket, as without overlap)
LAYOUTS = [("llama", 2, 1, 1, 0), ("gpt2", 1, 2, 1, 20), ("mixtral", 1, 1, 3, 0)]
LAYOUTS += slow(("gpt2", 2, 1, 1, 600), ("deepseek_v3", 1, 1, 2, 0), ("glm4_moe", 2, 1, 1, 0))


def save(
    mesh: DeviceMesh, kind: str, folder: Path, tp: int, pp: int, ep: int, bucket: int
) -> dict[str, Tensor]:
    """Two steps over bf16 weights, saved as Megatron-LM does; returns what plain AdamW makes of the
    same gradients."""
    pretend_there_is_a_gpu()
    dtype = torch.bfloat16
    model = build(kind, tp, pp, dtype, ep)
    optimizer = optimizer_of([model], zero=True, bucket=bucket)
    expected = stepped(model, optimizer)
    ranks = core("parallel_state")
    t, p, e = (
        getattr(ranks, f"get_{axis}_model_parallel_rank")()
        for axis in ("tensor", "pipeline", "expert")
    )
    place = folder / f"iter_{STEPS:07d}" / rank_folder(t, p, pp, e, ep)
    place.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    args = args_of(from_hugging_face(megatrons(kind)), PADDED[tp], tp, pp, False, dtype)
    args |= {
        "expert_model_parallel_size": ep,
        "overlap_grad_reduce": bool(bucket),
        "ddp_bucket_size": bucket or None,
    }
    args |= {"num_experts": model.config.num_moe_experts}
    if (
        ranks.get_expert_data_parallel_rank() == 0
        if ep > 1
        else ranks.get_data_parallel_rank() == 0
    ):
        content = {
            "args": argparse.Namespace(**args, iteration=STEPS),
            "checkpoint_version": 3.0,
            "iteration": STEPS,
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(content, place / "model_optim_rng.pt")
    dist.barrier()
    return {f"{place.name}/{name}": values for name, values in expected.items()}


def optimizer_of(chunks: Sequence[Any], zero: bool, bucket: int = 0, **options: Any) -> Any:
    """Megatron's optimizer of bf16 weights. zero: the distributed one. options: more of its
    configuration."""
    settings = core("distributed").DistributedDataParallelConfig(
        use_distributed_optimizer=zero,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bool(bucket),
        bucket_size=bucket or None,
    )
    wrapped = [
        core("distributed").DistributedDataParallel(
            chunk.config,
            settings,
            core("transformer.module").Float16Module(chunk.config, chunk),
            number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    return core("optimizer").get_megatron_optimizer(
        core("optimizer").OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=DECAY,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=0.0,
            use_distributed_optimizer=zero,
            **options,
        ),
        wrapped,
    )


def stepped(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Takes the steps; returns what plain AdamW makes of the same gradients."""
    expected = plain(model)
    for n in range(STEPS):
        for name, p in model.named_parameters():
            p.main_grad.copy_(gradient(name, p, n))
        assert optimizer.step()[0]
    return expected


def gradient(name: str, p: Any, step: int) -> Tensor:
    """Alike on ranks that hold the parameter alike, the tied copies too."""
    ranks = core("parallel_state")
    if getattr(p, "tensor_model_parallel", False):
        cut = ranks.get_tensor_model_parallel_rank()
    else:
        cut = 0
    cut = ranks.get_expert_tensor_parallel_rank() if ".experts." in name else cut
    apart = ranks.get_expert_model_parallel_rank() if not getattr(p, "allreduce", True) else 0
    canonical = "word_embeddings" if "word_embeddings" in name or "output_layer" in name else name
    stage = ranks.get_pipeline_model_parallel_rank() if "layers" in name else 0
    seed = zlib.crc32(f"{canonical} {cut} {apart} {stage} {step}".encode())
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


def plain(model: Any) -> dict[str, Tensor]:
    """ "NAME KIND" -> masters and moments after the same steps by torch's AdamW."""
    found = {}
    for name, p in model.named_parameters():
        master = torch.nn.Parameter(p.detach().float().clone())
        # of vectors too: its scheduler is not there
        adam = torch.optim.AdamW([master], lr=LR, weight_decay=DECAY)
        for n in range(STEPS):
            master.grad = gradient(name, p, n)
            adam.step()
        found |= {f"{name} {kind}": adam.state[master].get(kind, master).detach() for kind in KINDS}
    return found


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("kind", "tp", "pp", "ep", "bucket"), LAYOUTS)
def test_masters_and_moments_of_the_distributed_optimizer_are_read(
    kind: str, tp: int, pp: int, ep: int, bucket: int, tmp_path: Path
) -> None:
    axes = {"tp": tp, "pp": pp, "dp": max(2, ep)}
    answers = run_ranks(
        save, axes, kind=kind, folder=tmp_path / "megatron", tp=tp, pp=pp, ep=ep, bucket=bucket
    )
    expected = {name: values for answer in answers for name, values in answer.items()}
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text(f"{STEPS}")
    run(tmp_path / "megatron", tmp_path / "ours")
    assert {key.split("/")[0] for key in tensors(tmp_path / "ours")} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
    }
    run(tmp_path / "ours", tmp_path / "back", "--to", "megatron", "--layers", "local", "--dtype", "bf16",
        "--tp", tp, "--pp", pp, "--ep", ep)  # fmt: skip
    compared = 0
    for folder in sorted((tmp_path / f"back/iter_{STEPS:07d}").iterdir()):
        for name, held in _state(folder / "model_optim_rng.pt").items():
            for kind_of, values in zip(KINDS, held, strict=True):
                wanted = expected[f"{folder.name}/{name} {kind_of}"]
                if "embeddings.weight" in name or name.startswith("output"):
                    real = slice(131)
                else:
                    real = slice(None)
                if (
                    tp > 1 and real.stop
                ):  # the second rank has nothing but padding and the last rows
                    continue
                at = f"{folder.name} {name} {kind_of}"
                torch.testing.assert_close(values[real], wanted[real], rtol=1e-5, atol=1e-7, msg=at)
                compared += 1
    assert compared >= 3 * 20


def _state(file: Path) -> dict[str, tuple[Tensor, ...]]:
    """Name -> master and moments in one of our files."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(file, weights_only=True)
    if isinstance(content["optimizer"], list):
        optimizers = content["optimizer"]
    else:
        optimizers = [content["optimizer"]]
    named = {}
    for number, optimizer in enumerate(optimizers):
        for group, masters in zip(
            optimizer["optimizer"]["param_groups"], optimizer["fp32_from_fp16_params"], strict=True
        ):
            names = [
                n
                for n, v in content["model"].items()
                if (v.dim() > 1) == bool(group["wd_mult"])
                and not n.endswith("expert_bias")  # a buffer, which no optimizer has
                and (len(optimizers) == 1 or (".experts." in n) == bool(number))
            ]
            for name, index, master in zip(names, group["params"], masters, strict=True):
                moments = optimizer["optimizer"]["state"][index]
                named[name] = (master, moments["exp_avg"], moments["exp_avg_sq"])
    return named


@pytest.mark.slow
def test_a_layout_that_the_args_do_not_lead_to_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buckets of another size than the args say: the length tells, or else a master that is not its
    weight's."""
    run_ranks(save, {"dp": 2}, kind="gpt2", folder=tmp_path / "m", tp=1, pp=1, ep=1, bucket=20)
    file = tmp_path / f"m/iter_{STEPS:07d}/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["args"].ddp_bucket_size = 1 << 20
    torch.save(content, file)
    assert main(["convert", str(file.parents[1]), str(tmp_path / "ours")]) == 2
    assert shows(capsys.readouterr().err, "convert.megatron_distrib_layout")
