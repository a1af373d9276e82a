"""Numbers: precision, loss scaling, gradient buffers, the parallel AMP optimizer, checkpoints, data.

Nothing here builds a model or knows how one is cut; it is handed a torch `DeviceMesh` and parameters with layouts.
"""

from megaprec.comm import Axis as Axis
from megaprec.errors import UserError as UserError
from megaprec.events import StepReport as StepReport
from megaprec.layout import Layout as Layout
from megaprec.layout import Part as Part
from megaprec.layout import attach as attach
from megaprec.layout import attach_whole as attach_whole
from megaprec.optimizer import ParallelAMPOptimizer as ParallelAMPOptimizer
from megaprec.plan import LossScaling as LossScaling
from megaprec.plan import PrecisionPlan as PrecisionPlan
from megaprec.scaler import ConstantGradScaler as ConstantGradScaler
from megaprec.scaler import DynamicGradScaler as DynamicGradScaler
