"""The parallel AMP optimizer: flat buffers, gradient reduction, statistics, the consensus of all
ranks, loss scaling, update rules, ZeRO.
"""
