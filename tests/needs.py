"""What some tests need and not every machine has: where it is missing they skip and say so, and in CI they fail."""

import os
import shutil
from functools import cache

import pytest

from ddp_tutorial import lab


def need(what):
    """Skip the test, or fail it where .ci/run says that everything is there, unless this machine has `what`.

    what: "ip" (root, and Linux network namespaces), "slurm" or "mpirun".
    """
    missing = {"ip": _missing_for_namespaces, "slurm": _missing_for_slurm, "mpirun": _missing_for_mpirun}[what]()
    if missing and os.environ.get("DDP_TUTORIAL_NEEDS_ALL") == "1":
        pytest.fail(f"{missing}, and DDP_TUTORIAL_NEEDS_ALL=1 says that nothing is missing here")
    if missing:
        pytest.skip(missing)


@cache
def _missing_for_namespaces():
    name = f"need{os.getpid()}"
    try:
        lab.up(machines=1, name=name, say=str)
    except lab.NoNamespaces as reason:
        return str(reason)
    lab.down(name, say=str)
    return ""


@cache
def _missing_for_slurm():
    if os.geteuid() != 0:
        return "a Slurm controller and its daemons need root here"
    for command in ("slurmctld", "slurmd", "sbatch", "munged"):
        if not shutil.which(command) and not os.path.exists(f"/usr/sbin/{command}"):
            return f"Slurm needs {command} (Debian's packages slurm-wlm and munge)"
    return ""


@cache
def _missing_for_mpirun():
    return "" if shutil.which("mpirun") else "mpirun is missing (Debian's package openmpi-bin)"
