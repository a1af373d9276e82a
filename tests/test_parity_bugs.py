"""What `megaprec parity` compares with finds known bugs, planted in the ranks of a layout, and names the tensor."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec import overlap
from megaprec.buffer import Buffer
from megaprec.comm import Axis
from megaprec.data.blend import Blend
from megaprec.data.samples import Samples
from megaprec.gemm import Factor, Products
from megaprec.layout import Layout, layout_of
from megaprec.optimizer import ParallelAMPOptimizer
from megaprec.partial import sum_partial
from models import engine
from models.blocks import Block
from models.engine import Engine, Share
from models.stages import Cut, Stage
from parallel import linear
from tests.ranks import run_ranks
from tools.parity.certificate import entry
from tools.parity.compare import Noise, compare
from tools.parity.gather import Record, gather
from tools.parity.layouts import asked, fitted
from tools.parity.ranks import Run, corpus_of, run_alone
from tools.parity.record import Plan, record
from tools.parity.runs import alone, in_float64, made_ready, with_random_tokens
from tools.parity.shrink import Most
from tools.run import RunConfig, load_run
from tools.trainer import Trainer

Bug = Callable[[], None]
TRAIN = ["train.steps=9", "train.global_batch=12", "train.micro_batch=2", "train.seq_length=64", "train.folder=unused"]
RUNS = {
    "llama": ["model.preset=llama-demo"],
    "gpt2": ["model.preset=gpt2", "model.layers=4"],
}


# --- a run in ranks, with a bug or without


@cache
def ready(run: str) -> tuple[RunConfig, Plan]:
    """The run made small, its tokens, and what is done with it."""
    folder = Path(mkdtemp(prefix="megaprec_test_"))
    config = made_ready(load_run(None, [*RUNS[run], *TRAIN]), Most(2, 2, 2), False, 3, folder)
    config = with_random_tokens(config, 4, folder)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip": 0.01})})
    return in_float64(config), Plan(4, planted=1, into="layers.1.mlp.down.weight")


@cache
def reference(run: str) -> Record:
    config, plan = ready(run)
    return run_alone(Run(alone(config), plan, Path(mkdtemp(prefix="megaprec_test_")) / "run"))


def carried_out(run: Run, bug: Bug | None) -> Record:
    run.folder.mkdir(exist_ok=True)
    run.write()
    p = run.config.parallel
    run_ranks(record_rank, {"tp": p.tensor, "pp": p.pipeline, "dp": p.data}, folder=run.folder, bug=bug)
    return gather(run.folder)


def record_rank(mesh: DeviceMesh, folder: Path, bug: Bug | None) -> None:
    if bug is not None:
        bug()
    run = Run.read(folder)
    record(run.config, corpus_of(run.config), mesh, run.plan, run.folder)


def outcome(run: str, layout: str, folder: Path, bug: Bug | None = None) -> dict[str, Any]:
    """What the certificate says of the layout."""
    config, plan = ready(run)
    (said,) = asked([layout], config.parallel)
    made = fitted(config, said)
    here = config.model_copy(update={"parallel": made.parallel})
    ours = carried_out(Run(here, plan, folder), bug)
    return entry(made, "float64", here, compare(ours, reference(run), Noise()), ours, reference(run))


# --- known bugs


def tied_gradients_are_summed_twice() -> None:
    inner = ParallelAMPOptimizer._finish_sums

    def finish(self: ParallelAMPOptimizer) -> None:
        inner(self)
        for buffer, axis in self._tied:
            axis.sum_(buffer.own(buffer.grads))

    ParallelAMPOptimizer._finish_sums = finish


def tied_weights_count_twice_in_the_norm() -> None:
    Layout.counts = lambda self, pp_rank: True


def not_summed_over_tp(pattern: str) -> None:
    def some(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
        sum_partial([p for p in parameters if not re.search(pattern, layout_of(p).parts[0].name)], tp)

    overlap.sum_partial = some


def a_row_parallel_bias_is_not_summed_over_tp() -> None:
    not_summed_over_tp(r"(output|down)\.bias$")


def a_sequence_parallel_norm_is_not_summed_over_tp() -> None:
    not_summed_over_tp(r"norm\.weight$")


def replace_weight_gradient(change: Callable[[nn.Parameter, Callable[[], Tensor | None]], Tensor | None]) -> None:
    inner = linear.weight_gradient

    def made(products: Products, weight: nn.Parameter, grad: Factor, x: Factor) -> Tensor | None:
        return change(weight, lambda: inner(products, weight, grad, x))

    linear.weight_gradient = made


def a_split_gradient_of_a_shared_weight_is_added_twice() -> None:
    def change(weight: nn.Parameter, make: Callable[[], Tensor | None]) -> Tensor | None:
        if layout_of(weight).parts[0].name == "embedding.weight":
            make()
        return make()

    replace_weight_gradient(change)


def micro_batches_overwrite_gradients() -> None:
    def change(weight: nn.Parameter, make: Callable[[], Tensor | None]) -> Tensor | None:
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        return make()

    replace_weight_gradient(change)


def a_stage_is_left_out_of_the_norm() -> None:
    inner = ParallelAMPOptimizer._own_numbers

    def numbers(self: ParallelAMPOptimizer, loss: Tensor | None) -> Tensor:
        if self.pp.rank == 1:
            self._counted = []
        return inner(self, loss)

    ParallelAMPOptimizer._own_numbers = numbers


def tokens_are_counted_per_rank() -> None:
    inner = Engine._begin

    def begin(self: Engine, share: Share, step: int | None, scale: Tensor) -> engine._Running:
        run = inner(self, share, step, scale)
        assert share.mask is not None
        run.num_tokens = share.mask.sum().double()
        return run

    Engine._begin = begin


def a_layer_is_on_no_stage() -> None:
    inner = Stage.__init__

    def init(self: Stage, config: Any, context: Any, cut: Cut, tied: tuple[int, ...] = ()) -> None:
        inner(self, config, context, replace(cut, layers=[n for n in cut.layers if n != 2]), tied)  # type: ignore[arg-type]

    setattr(Stage, "__init__", init)  # noqa: B010  # its arguments are only passed on


def a_layer_is_not_run() -> None:
    inner = Block.forward

    def forward(self: Block, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return x if self.name == "layers.2" else inner(self, x, *rest, **named)

    setattr(Block, "forward", forward)  # noqa: B010  # its arguments are only passed on


def gradients_are_averaged_over_dp() -> None:
    inner = Buffer.start_reduce

    def start_reduce(self: Buffer) -> Callable[[], None]:
        finish = inner(self)
        return lambda: (finish(), self.grads.div_(self.dp.size), None)[2]

    Buffer.start_reduce = start_reduce


def the_replicas_take_the_same_samples() -> None:
    def share(self: Trainer, samples: Samples | Blend, position: int) -> Share:
        batch = samples.batch(position, self.config.train.global_batch // self.dp.size)
        return Share(batch.tokens, batch.targets, batch.mask)

    Trainer.share = share


def the_clip_hangs_on_the_rank() -> None:
    inner = ParallelAMPOptimizer._clip_factor
    ParallelAMPOptimizer._clip_factor = lambda self, norm: inner(self, norm * (1 + self.pp.rank))


# bug, run, layout, quantity and tensor (patterns) of the first difference, its ratio (None: any), the cause (a pattern)
BUGS: list[tuple[Bug, str, str, str, str, float | None, str]] = [
    (tied_gradients_are_summed_twice, "gpt2", "pp=2", "gradient", r"embedding\.weight", 2, "counted twice"),
    (tied_weights_count_twice_in_the_norm, "gpt2", "pp=2", "gradient norm", "", None, "norm is too large"),
    (a_row_parallel_bias_is_not_summed_over_tp, "gpt2", "tp=2,sequence=true", "gradient",
     r"layers\.3\.mlp\.down\.bias", None, r"layers.3.mlp.down.bias among them: .* to be summed over tp"),
    (a_sequence_parallel_norm_is_not_summed_over_tp, "llama", "tp=2,sequence=true", "gradient",
     r"final_norm\.weight", None, r"final_norm.weight among them: .* to be summed over tp"),
    (a_split_gradient_of_a_shared_weight_is_added_twice, "gpt2", "pp=2,schedule=zb-v", "gradient",
     r"embedding\.weight", None, "counted twice"),
    (a_stage_is_left_out_of_the_norm, "llama", "pp=2", "gradient norm", "", None, "norm is too small: a stage"),
    (micro_batches_overwrite_gradients, "llama", "pp=2", "gradient",
     r"layers\.\d.*", None, "gradients are lost"),
    (tokens_are_counted_per_rank, "llama", "dp=2", "loss", "", None, "its own tokens"),
    (a_layer_is_on_no_stage, "llama", "pp=2", "tensors", r"layers\.2\..*", None, "layer 2 is on no rank"),
    (a_layer_is_not_run, "llama", "pp=2", "loss", "", None, r"layers\.2\.\*: the layer is left out"),
    (gradients_are_averaged_over_dp, "llama", "dp=2", "gradient", r"final_norm\.weight", 0.5, "averaged over dp"),
    (the_replicas_take_the_same_samples, "llama", "dp=2", "sample ids", "", None, "do not take the samples"),
    (the_clip_hangs_on_the_rank, "llama", "pp=2", "moments|weights", ".*", None, "clipping"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "run", "layout", "quantity", "name", "ratio", "cause"), BUGS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_known_bug_is_found_and_named(
    bug: Bug, run: str, layout: str, quantity: str, name: str, ratio: float | None, cause: str, tmp_path: Path
) -> None:
    found = outcome(run, layout, tmp_path, bug)
    assert found["verdict"] == "different"
    first = found["first"]
    assert re.fullmatch(quantity, first["quantity"]), first
    assert re.fullmatch(name, first["name"]), first
    assert ratio is None or first["ratio"] == pytest.approx(ratio, rel=1e-9)
    assert re.search(cause, found["likely_cause"]), found["likely_cause"]


@pytest.mark.parametrize(
    ("run", "layout"), [("gpt2", "tp=2,sequence=true"), ("gpt2", "pp=2,schedule=zb-v"), ("llama", "dp=2")]
)
def test_and_nothing_is_found_where_there_is_no_bug(run: str, layout: str, tmp_path: Path) -> None:
    found = outcome(run, layout, tmp_path)
    assert found["verdict"] == "same", found
    compared = {"loss", "gradient", "gradient norm", "zero count", "found_inf", "scaler", "weights", "moments"}
    assert compared <= found["quantities"].keys()
    steps = [step["outcome"] for step in reference(run).steps]
    assert steps == ["applied", "skipped_overflow", "applied", "applied"]
