"""All faults that are planted, by name."""

from tests import parity_faults_backward, parity_faults_forward

FAULTS = parity_faults_forward.FAULTS | parity_faults_backward.FAULTS
