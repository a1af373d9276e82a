"""The numeric core: precision, loss scaling, gradient buffers, the parallel AMP optimizer, checkpoints and data.

This package builds no model and does not decide how a model is sharded: its callers pass a torch `DeviceMesh` and
parameters that carry layouts.
"""

from megaprec.comm.axis import Axis as Axis
from megaprec.comm.layout import Layout as Layout
from megaprec.comm.layout import Part as Part
from megaprec.comm.layout import attach as attach
from megaprec.comm.layout import attach_whole as attach_whole
from megaprec.errors import UserError as UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer as ParallelAMPOptimizer
from megaprec.optim.scaler import ConstantGradScaler as ConstantGradScaler
from megaprec.optim.scaler import DynamicGradScaler as DynamicGradScaler
from megaprec.optim.step_report import StepReport as StepReport
from megaprec.precision.plan import LossScaling as LossScaling
from megaprec.precision.plan import PrecisionPlan as PrecisionPlan
