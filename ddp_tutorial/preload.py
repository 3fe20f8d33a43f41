"""What ranks are forked from has imported this; see `ranks`. Not meant for anything else."""

import gc

import torch._dynamo  # noqa: F401 - by itself it is imported when the first optimizer is made, 1.5 s in each rank

# What has been imported stays: ranks need not search it for garbage, nor copy the pages in which that is noted.
gc.freeze()
