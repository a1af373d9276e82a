"""Mixed-precision training that can be trusted: the step really happened, or you are told which
parameter broke it.

The smallest whole use, on one process; the same loop runs on many with a mesh:

    import megaprec

    model = torch.nn.Linear(8, 1)
    megaprec.attach_whole(model)            # parameters are named by their paths
    precision = megaprec.plan("fp32")       # or "bf16", "fp16": dtypes and loss scale as one value
    optimizer = megaprec.ParallelAMPOptimizer([model], precision, lr=1e-3)
    for x, y in batches:
        loss = (model(x) - y).square().mean()
        (loss * optimizer.scale).backward()
        report = optimizer.step(loss=loss)  # what happened: .outcome, .grad_norm, .offenders

`parallel` has tensor-parallel layers and pipelines, `models` whole transformers. This package knows
neither: it takes a torch DeviceMesh and parameters that carry layouts.

`megaprec.train("run.toml")` is a whole run, as the command `megaprec train` trains it.
"""

from megaprec import command_path

if command_path.is_command():  # before any other module is looked for
    command_path.leave_out_working_folder()

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from megaprec.checkpoint.save_load import load, load_weights, save
    from megaprec.comm.axis import Axis
    from megaprec.comm.layout import Layout, Part, attach, attach_whole, layout_of
    from megaprec.diagnose.nonfinite_trace import Trace
    from megaprec.diagnose.overflow_monitor import OverflowMonitor
    from megaprec.errors import UserError
    from megaprec.optim.decision.step_report import NonFiniteStep, Offender, StepReport
    from megaprec.optim.optimizer import ParallelAMPOptimizer
    from megaprec.optim.rules.lr import LRSchedule
    from megaprec.optim.rules.param_groups import Group
    from megaprec.optim.rules.torch_rule import TorchRule
    from megaprec.optim.rules.update_rules import SGD, AdamW, Lion
    from megaprec.optim.state.host_memory import HostMemory
    from megaprec.precision.fp8_recipe import FP8Recipe
    from megaprec.precision.marks import module_has_fp32_attr, set_fp32_attr_to_module
    from megaprec.precision.module_wrappers import NaiveAMPModel, PlannedModel
    from megaprec.precision.parallel_modes import ParallelMode
    from megaprec.precision.plan import LossScaling, PrecisionPlan, plan
    from megaprec.precision.tf32 import tf32
    from megaprec.train_program import TrainingResult, TrainingStopped, train

__getattr__, __dir__ = front_door(__name__)

__all__ = [
    "SGD",
    "AdamW",
    "Axis",
    "FP8Recipe",
    "Group",
    "HostMemory",
    "LRSchedule",
    "Layout",
    "Lion",
    "LossScaling",
    "NaiveAMPModel",
    "NonFiniteStep",
    "Offender",
    "OverflowMonitor",
    "ParallelAMPOptimizer",
    "ParallelMode",
    "Part",
    "PlannedModel",
    "PrecisionPlan",
    "StepReport",
    "TorchRule",
    "Trace",
    "TrainingResult",
    "TrainingStopped",
    "UserError",
    "attach",
    "attach_whole",
    "layout_of",
    "load",
    "load_weights",
    "module_has_fp32_attr",
    "plan",
    "save",
    "set_fp32_attr_to_module",
    "tf32",
    "train",
]
