"""Checkpoints in logical tensors: what is saved knows nothing of the layout it was saved from.

    <folder>/step_00000100/
        checkpoint.json                 what is where, step, scaler, and what the caller wants kept
        model-00003.safetensors         weights (the masters) that rank 3 wrote, by logical name
        optimizer-00003.safetensors     moments that rank 3 wrote: exp_avg/<name>, exp_avg_sq/<name>
        fp8-00003.safetensors           FP8 scales and amax histories, where there are any

A logical tensor is cut into at most tp rectangles (chunks), each written once, by one rank. Any layout reads what
it needs of them. No file is a pickle.
"""
