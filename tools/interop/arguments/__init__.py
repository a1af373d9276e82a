"""The arguments of Megatron-LM and the keys of DeepSpeed: what each means here, or why it means
nothing."""
