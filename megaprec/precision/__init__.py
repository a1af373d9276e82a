"""Every numeric decision as one frozen `PrecisionPlan`, rounding, TF32, matrix products, and
mixed precision around any torch module.
"""
