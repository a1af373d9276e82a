"""All faults, by name."""

from tests.shared_faults import data_faults, model_faults, optimizer_faults
from tests.shared_faults.fault import Fault

FAULTS: dict[str, Fault] = {
    **data_faults.FAULTS,
    **model_faults.FAULTS,
    **optimizer_faults.FAULTS,
}
