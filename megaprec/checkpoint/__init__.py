"""Checkpoints of logical tensors, which do not depend on the layout that saved them.

    <folder>/step_00000100/
        checkpoint.json              index of the tensors, step, scaler, and values that the
                                     caller adds
        model-00003.safetensors      weights (the masters) that rank 3 wrote, by logical name
        optimizer-00003.safetensors  moments that rank 3 wrote: exp_avg/<name>, exp_avg_sq/<name>
        fp8-00003.safetensors        FP8 scales and amax histories, if there are any

A logical tensor is split into chunks: rectangles, or flat ranges of rectangles. Each is written
once, by the rank that owns it. A rank of any layout reads the parts that it needs. No file is a
pickle.
"""
