"""What the notebooks and scripts of *DDP, step by step* share, and what is not the lesson.

Importing this package is cheap: PyTorch, torchvision and Matplotlib are imported only by the parts that use them.
In a notebook, ``%load_ext ddp_tutorial`` brings ``%%part``, ``%launch`` and ``%%launch``.
"""

__version__ = "0.1.0"


def load_ipython_extension(shell):
    """Called by ``%load_ext ddp_tutorial``."""
    from ddp_tutorial import magics

    magics.load(shell)


def unload_ipython_extension(shell):
    """Called by ``%unload_ext ddp_tutorial`` and before ``%reload_ext ddp_tutorial`` loads it again."""
    from ddp_tutorial import magics

    magics.unload(shell)
