"""Takes all objects that exist when this is imported out of garbage collection: the last import of
servers that fork.

Otherwise the first full collection in each forked rank visits every object of torch and of ours,
and writes to it: that takes longer than most tests, and copies the memory that ranks share.
"""

import gc

gc.collect()
gc.freeze()
