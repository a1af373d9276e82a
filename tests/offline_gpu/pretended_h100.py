"""An H100 that is not there: torch's build for CUDA believes in one, and compiles for it.

torch asks the driver what the GPU is. Here the questions are answered, so that Inductor chooses
what it would choose for an H100 and writes Triton, of which Triton and NVIDIA's assembler make
machine code. None of these needs a driver. No kernel can run, but with TRITON_INTERPRET=1 Triton
interprets them on tensors of the CPU, and the code that launches them is Inductor's own.

Private names of torch and Triton stand here and nowhere else: this is tried with one release.
"""

import importlib
import math
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._inductor
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses import fake_tensor
from torch.fx import GraphModule

from parallel.compiled_leaves import compiled, inductor
from parallel.leaves import LeafCall
from parallel.regions import compiled_region

# missing where torch is built for CPUs
triton: Any = importlib.import_module("triton")
triton_compiler: Any = importlib.import_module("triton.backends.compiler")
triton_driver: Any = importlib.import_module("triton.runtime.driver")
triton_interpreter: Any = importlib.import_module("triton.runtime.interpreter")
interpreted: bool = triton.knobs.runtime.interpret

# blocks for the interpreter, of the dim that a kernel sums over and of the others: small sizes have
# several blocks and a rest
SUMMED_BLOCK = 64
LEAST_BLOCK = 32
SHARED_MEMORY = 227 * 2**10
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=SHARED_MEMORY + 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


class _NoGuard(AbstractContextManager[None]):
    """Takes the place of torch.cuda.device: there is one device only."""

    def __init__(self, device: object) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class Kernel:
    """A kernel that Inductor wrote, with the blocks that it would try for it.

    source: in Triton.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self._autotuner: Any = async_compile._load_triton_kernel_from_source(name, source)

    def machine_code(self) -> list[bytes]:
        """Machine code of sm_90 for each choice of blocks and warps."""
        made = [self._autotuner._precompile_config(each) for each in self._autotuner.configs]
        return [each.kernel.asm["cubin"] for each in made]

    def run(self, *arguments: Any, stream: int) -> None:
        """What the generated code calls. On tensors of the CPU the kernel is interpreted."""
        if any(isinstance(x, Tensor) and x.is_meta for x in arguments):
            return
        # the fewest programs, each of which takes as long whatever its size
        choices = [dict(each.kwargs) for each in self._autotuner.configs]
        blocks = max(choices, key=lambda each: math.prod(each.values()))
        if "R0_BLOCK" in blocks:
            blocks["R0_BLOCK"] = SUMMED_BLOCK
        if "XBLOCK" in blocks:
            blocks["XBLOCK"] = max(blocks["XBLOCK"], LEAST_BLOCK)
        # Triton has no name for scales of MX, and Inductor takes them as bytes
        arguments = tuple(
            x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.float8_e8m0fnu else x
            for x in arguments
        )
        grid = triton_heuristics.GridExpr.from_meta(self._autotuner.inductor_meta, blocks)
        named = dict(zip(self._autotuner.fn.arg_names, arguments, strict=False))
        launch = self._autotuner.fn[grid.eval_slow({**named, **blocks})]
        # infinities and NaNs are numbers to a GPU
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter's use of numpy is deprecated
            launch(*arguments, **blocks)


class PretendedH100:
    """Answers in the driver's place while `patch` lasts.

    kernels: all that were compiled since the list was cleared.
    """

    interpreted = interpreted

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kernels: list[Kernel] = []
        # torch's own, for fake tensors where there is no driver
        torch._C._ensureCUDADeviceGuardSet()
        _answer_for_torch(patch)
        _answer_for_triton(patch)
        _keep_inductor_from_the_device(patch)
        patch.setattr(async_compile.AsyncCompile, "triton", self._note)
        if interpreted:
            patch.setattr(triton_helpers, "libdevice", _functions_of_libdevice())
            patch.setattr(triton_interpreter, "_convert_float", _converted)
            patch.setattr(triton_interpreter.ReduceOps, "generic_reduce", _reduced)

    def _note(self, name: str, source: str, device_str: str = "cuda") -> Kernel:
        self.kernels.append(Kernel(name, source))
        return self.kernels[-1]

    def compiled(self, call: LeafCall) -> Callable[..., Any]:
        """The compiled form of a call of a leaf or region on the GPU. `kernels` are its kernels
        then. Interpreted, it takes tensors of the CPU."""
        self.kernels.clear()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns of its own parts
            if call.region:
                # autograd would ask for the device of fake tensors, of meta tensors it does not
                return compiled_region(call.on("meta"), _compile)
            with fake_tensor.FakeTensorMode():
                return compiled(call)


def _compile(graph: GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph that was traced with meta tensors for tensors of the GPU."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    with fake_tensor.FakeTensorMode():
        on_gpu = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in examples
        ]
    return inductor(graph, on_gpu)


def _functions_of_libdevice() -> types.SimpleNamespace:
    """Functions of NVIDIA's library for devices, which the interpreter does not have, by those that
    it has, looked up when they are called: it then has put its own in their places."""
    language = triton.language

    def tanh(x: Any) -> Any:
        return 1 - 2 / (language.exp(2 * x) + 1)

    return types.SimpleNamespace(
        exp=lambda x: language.exp(x),
        log=lambda x: language.log(x),
        sqrt=lambda x: language.sqrt(x),
        rsqrt=lambda x: language.rsqrt(x),
        erf=lambda x: language.erf(x),
        tanh=tanh,
        isnan=lambda x: x != x,
        isinf=lambda x: language.abs(x) == float("inf"),
    )


def _reduced(reduction: Any, inputs: Sequence[Any]) -> list[Any]:
    """Reduce blocks, whose sizes are powers of two, by halves. The interpreter itself combines
    numbers one by one, for seconds."""
    arrays = [block.handle.data for block in inputs]
    axis = reduction.axis
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
        axis = 0
    while arrays[0].shape[axis] > 1:
        halves = zip(*(np.split(array, 2, axis) for array in arrays), strict=True)
        blocks = [
            reduction.to_tensor(array, block.dtype)
            for half in halves
            for array, block in zip(half, inputs, strict=True)
        ]
        combined = reduction.combine_fn.fn(*blocks)
        results = combined if isinstance(combined, tuple) else (combined,)
        arrays = [result.handle.data for result in results]
    if reduction.axis is None:
        shape = [1] * inputs[0].handle.data.ndim if reduction.keep_dims else []
        arrays = [array.reshape(shape) for array in arrays]
    elif not reduction.keep_dims:
        arrays = [array.squeeze(axis) for array in arrays]
    return [
        reduction.to_tensor(array if array.ndim else array.item(), block.dtype)
        for array, block in zip(arrays, inputs, strict=True)
    ]


_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _converted(
    values: np.ndarray,
    source: Any,
    target: Any,
    rounding_mode: object,
) -> np.ndarray:
    """Numbers in another of Triton's formats, as bits, rounded to nearest even as a GPU rounds. The
    interpreter's own conversion truncates."""
    source_dtype = _DTYPES[source.name]
    target_dtype = _DTYPES[target.name]
    bits = torch.from_numpy(np.ascontiguousarray(values)).view(_BITS[source_dtype.itemsize])
    converted = bits.view(source_dtype).to(target_dtype)
    return converted.view(_BITS[target_dtype.itemsize]).numpy()


def _answer_for_torch(patch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_DeviceGuard": _NoGuard,
        "device": _NoGuard,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name):  # Inductor's own way to the same answers
            patch.setattr(CudaInterface, name, staticmethod(answer))
    patch.setattr(CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90))
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
    patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)


def _answer_for_triton(patch: pytest.MonkeyPatch) -> None:
    target = triton_compiler.GPUTarget("cuda", 90, 32)
    properties = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}
    active = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )
    patch.setattr(triton_driver.driver, "_active", active)
    patch.setattr(triton_driver.driver, "_default", active)
    patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)


def _keep_inductor_from_the_device(patch: pytest.MonkeyPatch) -> None:
    # its patterns of products, attention and permutations are traced on the device itself
    patch.setattr(joint_graph, "lazy_init", lambda device=None: None)
    # and constants are computed there
    patch.setattr(config, "joint_graph_constant_folding", False)
    patch.setattr(config, "force_disable_caches", True)
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    patch.setattr(guards, "_empty_strided_cuda", _written_by_kernel)
    patch.setattr(guards, "_reinterpret_tensor", _reinterpreted)


def _written_by_kernel(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Memory of the CPU."""
    return torch.empty_strided(shape, stride, dtype=dtype)


def _reinterpreted(
    tensor: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> Tensor:
    """A view as Inductor makes it, of fake tensors too."""
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)
