import socket

JOB_NAME = "7b"
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=False, clip_grad_norm=1.0)
model = dict(num_attention_heads=32, hidden_size=4096, num_layers=32, dtype="torch.float16")
parallel = dict(zero1=dict(size=-1))
if socket.gethostname().startswith("a800"):
    model["dtype"] = "torch.bfloat16"
