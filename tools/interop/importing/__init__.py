"""Run files from command lines of Megatron-LM and configurations of DeepSpeed, which are read and
never run."""
