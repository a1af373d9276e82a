from colossalai.booster.plugin import HybridParallelPlugin

# the run that the half-precision ones are held against
plugin = HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=4, pp_style="1f1b", max_norm=1.0)
