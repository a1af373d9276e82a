"""All faults that are planted, by name."""

from tests.parity import faults_backward, faults_forward

FAULTS = faults_forward.FAULTS | faults_backward.FAULTS
