"""Run a script on one CPU core: on_core.py CORE SCRIPT [OPTIONS]. CORE counts from 0, or is `rank` under torchrun.

By themselves, processes are moved from core to core, and two that wait for each other may meet on one. The policy for
batch jobs, which `chrt --batch 0 COMMAND` gives to any command, is for Gloo. Its socket thread, when it wakes, may
push aside the thread that holds the lock it needs, and then asks for that lock until the kernel's next tick: 4 ms at
250 ticks a second, more than a step's communication takes. A batch job's thread waits for its turn instead.
"""

import os
import runpy
import sys

core, *sys.argv = sys.argv[1:]
core = os.environ["LOCAL_RANK"] if core == "rank" else core
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(core)]})
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
runpy.run_path(sys.argv[0], run_name="__main__")
