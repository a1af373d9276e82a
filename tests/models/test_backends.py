"""The kernels of attention that a run's layers take are named, and on a GPU their order is fixed."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megaprec.precision.plan import plan
from models.attention.backends import backend_order, gpu_kernels, kernel_names
from models.config import ModelConfig
from models.estimate.storage import without_storage
from tools.config.run_file import load_run

SMALL: dict[str, Any] = {
    "family": "llama",
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "ffn": 64,
    "vocab": 64,
    "max_positions": 256,
}
CUDNN = "cuDNN from compute capability 9.0 on, else flash attention"
PARTIAL = "partial attention, over the keys of all ranks of cp"
FLASH_WINDOWS = "flash attention on a GPU, within windows and documents"


def kernels_on_gpu(precision: str = "bf16", cp: int = 1, **model: Any) -> list[str]:
    with without_storage("cuda"):
        config = ModelConfig(**SMALL | model)
        return kernel_names(config, plan(precision), 1, cp, (2, 256), False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [CUDNN]),
        ({"precision": "fp32"}, ["memory-efficient attention"]),
        ({"precision": "fp64"}, ["plain products"]),
        ({"window": 64}, [FLASH_WINDOWS]),
        ({"window": 64, "window_layers": (0, 2)}, [CUDNN, FLASH_WINDOWS]),
        ({"window": 512}, [CUDNN]),
        ({"cp": 2}, ["flash attention on a GPU, for the keys of each rank of cp"]),
        ({"cp": 2, "precision": "fp32"}, [PARTIAL]),
        ({"cp": 2, "window": 64}, [PARTIAL]),
        (
            {"attention_dropout": 0.1},
            ["matrix products and a softmax, all scores in memory"],
        ),
        ({"kv_heads": 2}, [CUDNN]),
    ],
    ids=str,
)
def test_the_kernels_of_all_layers_are_named_before_a_gpu_is_there(
    options: dict[str, Any], expected: list[str]
) -> None:
    assert sorted(kernels_on_gpu(**options)) == sorted(expected)


def test_on_a_cpu_the_kernel_that_runs_is_named() -> None:
    named = kernel_names(ModelConfig(**SMALL), plan("fp32"), 1, 1, (2, 256), False)
    assert named == ["torch's scaled_dot_product_attention"]


def test_cudnn_comes_first_where_it_is_faster_and_never_where_bits_must_repeat() -> None:
    hopper = backend_order((9, 0), deterministic=False)
    ampere = backend_order((8, 0), deterministic=False)
    assert hopper[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert ampere[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    assert set(hopper) == set(ampere)
    for capability in ((8, 0), (9, 0), (10, 0)):
        order = backend_order(capability, deterministic=True)
        assert set(order) == set(hopper) - {SDPBackend.CUDNN_ATTENTION}


@pytest.mark.parametrize(
    ("keys", "device", "shared"),
    [
        (["parallel.tensor=2"], "cuda", True),
        (["parallel.tensor=2"], "cpu", False),
        (["parallel.tensor=2", "parallel.sequence=false"], "cuda", False),
        ([], "cuda", False),
        (["parallel.tensor=2", "train.seq_length=15"], "cuda", False),
        (["parallel.tensor=2", "parallel.context=2", "train.seq_length=12"], "cuda", True),
        (
            ["parallel.tensor=2", "train.numerics=canonical", "train.threads=1"],
            "cuda",
            False,
        ),
    ],
    ids=str,
)
def test_on_gpus_tensor_ranks_share_the_activations_between_products(
    keys: list[str], device: str, shared: bool
) -> None:
    model = ["model.layers=1", "model.hidden=32", "model.heads=4", "model.vocab=64"]
    sizes = ["train.steps=1", "train.global_batch=2", "train.micro_batch=1", "data.vocab_size=64"]
    config = load_run(None, [*model, *sizes, "train.seq_length=16", *keys]).on_device(device)
    assert config.parallel.sequence == shared
    expected = "default on a GPU" if shared else "default"
    if "parallel.sequence=false" not in keys:
        assert config.origin("parallel.sequence") == expected


def test_settings_for_a_gpu_leave_a_process_on_a_cpu_as_it_was() -> None:
    with gpu_kernels("cpu", deterministic=True):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_of_the_process_are_put_back(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with gpu_kernels("cuda", deterministic):
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cuda.cudnn_sdp_enabled() != deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
