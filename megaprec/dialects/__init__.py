"""The mixed-precision configurations of NxD, SMP, Colossal-AI, InternEvo and NeMo, read into a
`PrecisionPlan` and written back.
"""
