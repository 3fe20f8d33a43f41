"""What ranks are forked from has imported this; see `ranks`. Not meant for anything else."""

import gc

import torch._dynamo  # by itself it is imported when the first optimizer is made, which takes each rank 1.5 s
import torch.distributed  # noqa: F401

# What has been imported stays: ranks need not search it for garbage, nor copy the pages in which that is noted.
gc.freeze()
