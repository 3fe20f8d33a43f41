"""Ports, and whether the machines of a job agree: what must be settled before processes can meet."""

import json
import os
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_tutorial.arguments import refuse
from ddp_tutorial.preflight import stderr_into

# Options that may differ from machine to machine; the process counts are compared by themselves.
THIS_MACHINES = ("nodes", "nproc", "node_rank", "master_addr", "master_port", "data_dir", "json", "checkpoint",
                 "snapshot", "predictions", "threads", "device", "init_method", "save_every")


def free_port():
    """A TCP port on this machine that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bytes_sent():
    """Bytes that this process has handed to the operating system so far, to send or to write; None except on Linux.

    Counts what goes through ``write``, as the TCP messages of Gloo do, not through memory that processes share.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def check_port(address, port, remedy="give this machine's own address, and leave out --master-port to get a free one"):
    """Refuse, in one line, to listen on `address:port` where that cannot be done."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            refuse(f"cannot listen on {address}:{port} ({error.strerror}): {remedy}")


def check_tcp(init_method):
    """Refuse, in one line, a ``tcp://HOST:PORT`` at which this machine cannot listen."""
    address, _, port = init_method.removeprefix("tcp://").rpartition(":")
    check_port(address, int(port), remedy="name a free port, or leave out --init-method")


def check_launcher():
    """Refuse, in one line, what launchers set in the environment where it cannot be right.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    given = {name: os.environ.get(name, "") for name in (*names, "MASTER_ADDR")}
    try:
        rank, world_size, local_rank, local_world_size, port = (int(given[name]) for name in names)
        fits = 0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size and 0 < port < 65536
    except ValueError:
        fits = False
    if not fits or not given["MASTER_ADDR"]:
        os.environ.pop("LOCAL_RANK", None)  # it may be what is wrong, and refuse() looks at it
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        refuse(f"the launcher's variables do not fit together ({shown}): start it with torchrun, srun or mpirun")
    os.environ["MASTER_ADDR"] = given["MASTER_ADDR"].strip("[]")  # of an IPv6 address in a URL


def meet(world_size, patience):
    """What ``dist.rendezvous("env://")`` gives, the store at MASTER_ADDR:MASTER_PORT, or a refusal in one line.

    patience: seconds to wait for rank 0, and on rank 0 for the others.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    remedy = f"to find out why, run python -m ddp_tutorial --rendezvous {where} on each machine"
    late = f"not all {world_size} ranks came to {where} within {patience:g} s: {remedy}"
    stderr = os.dup(2)
    # What answers, but is no store, would be waited for without an end.
    watchdog = threading.Timer(patience + 10, lambda: (os.write(stderr, f"{late}\n".encode()), os._exit(2)))
    watchdog.daemon = True
    watchdog.start()
    try:
        with tempfile.TemporaryFile() as said, stderr_into(said):  # it fails with 50 lines of C++
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
    except RuntimeError as error:  # a port in use is a DistNetworkError only after PyTorch 2.6
        refuse(f"another program uses port {port} on this machine: choose another MASTER_PORT"
               if "EADDRINUSE" in str(error) else late)
    finally:
        watchdog.cancel()
        os.close(stderr)
    return store


def check_data_agree(train_set, test_set):
    """Refuse the job in one line where the ranks, which form a process group, have loaded different data."""
    name = {"mnist": "MNIST", "printed": "printed digits"}.get(train_set.source, train_set.source)
    own = f"{name}, {len(train_set):,} and {len(test_set):,} images"
    all_have = [None] * dist.get_world_size()
    dist.all_gather_object(all_have, own)
    for rank, other in enumerate(all_have):
        if other != all_have[0]:
            refuse(f"rank 0 has {all_have[0]}, but rank {rank} {other}: give all machines the same data")


def check_machines_agree(nodes, node_rank, processes, address, port, options=None, patience=60.0):
    """Let the machines of a job compare their process counts, and refuse the job in one line where they differ.

    Ranks are counted as `node_rank * processes + local_rank`. With unequal counts two processes would get the same
    rank, and all of them would wait for one that never comes. The port is free again when this returns.
    With different options the machines would train different models, or one would wait for the other for ever.

    Args:
        nodes, node_rank: machines of the job, and the number of this one.
        processes: processes that this machine is about to start.
        address, port: where machine 0 listens.
        options: the training's other options, by name; those of THIS_MACHINES may differ.
        patience: seconds to wait for the other machines.
    """
    where = f"{address}:{port}"
    plan = {"--nodes": nodes, "--nproc": processes} | _that_must_agree(options or {})
    try:
        store = dist.TCPStore(address, port, is_master=node_rank == 0, wait_for_workers=False,
                              timeout=timedelta(seconds=patience))
    except RuntimeError:  # a port in use is a DistNetworkError only after PyTorch 2.6
        if node_rank == 0:
            refuse(f"cannot listen on {where}: give this machine's own address and a port that nobody uses")
        refuse(f"found no machine 0 at {where} within {patience:.0f} s: start it, and check address and port")
    _refuse_unless_all_agree(
        store, "machine", node_rank, nodes, plan, patience,
        f"not all {nodes} machines came to {where} within {patience:.0f} s: start one for each --node-rank")


def check_ranks_agree(store, rank, world_size, options, patience):
    """Let the ranks of a job compare options and PyTorch versions, and refuse the job in one line where they differ.

    Call it on all ranks before they form a process group: ranks with other options would train something else, or
    wait for each other; another PyTorch may not even speak the same language.

    Args:
        store: one that all ranks share, new for each attempt.
        options: dict of what the command line said; what may differ from rank to rank is left out.
        patience: seconds to wait for the other ranks.
    """
    plan = _that_must_agree(options) | {"PyTorch": str(torch.__version__)}
    plan["--snapshot"] = "given" if options.get("snapshot") else "not given"  # the folders may differ
    _refuse_unless_all_agree(
        dist.PrefixStore("plans", store), "rank", rank, world_size, plan, patience,
        f"not all {world_size} ranks came within {patience:g} s: is the command running on all machines?")


def _that_must_agree(options):
    return {f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if name not in THIS_MACHINES}


def _refuse_unless_all_agree(store, kind, number, count, plan, patience, not_all):
    """The first of `count` machines or ranks compares all plans and tells the others what it found."""
    try:
        if number == 0:
            verdict = _compare_plans(store, kind, count, plan, timedelta(seconds=patience))
            store.set("verdict", verdict)
            # The store may end with this process, so it must outlive its last reader.
            store.wait([f"heard {other}" for other in range(1, count)], timedelta(seconds=5 if verdict else patience))
        else:
            store.set(f"{kind} {number}", json.dumps(plan))
            store.wait(["verdict"], timedelta(seconds=patience))
            verdict = store.get("verdict").decode()
            store.set(f"heard {number}", "")
    except (dist.DistNetworkError, dist.DistStoreError):
        refuse(not_all)
    if verdict:
        refuse(verdict)


def _compare_plans(store, kind, count, plan, patience):
    """Empty where all have the plan of the first, else one line about the first that does not."""
    for number in range(1, count):
        store.wait([f"{kind} {number}"], patience)
        other = json.loads(store.get(f"{kind} {number}"))
        differing = [name for name in plan | other if plan.get(name) != other.get(name)]
        if differing:
            mine, theirs = (", ".join(f"{name} {each.get(name)}" for name in differing) for each in (plan, other))
            return f"{kind} 0 has {mine}, but {kind} {number} {theirs}: give all of them the same"
    return ""
