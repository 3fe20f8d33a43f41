# %% About
"""Pass messages between processes: from one to another, and by every collective of PyTorch.

python scripts/05_message_passing.py broadcast --nproc 4      # one demo
python scripts/05_message_passing.py send_recv ring           # several, one after the other
python scripts/05_message_passing.py all --nproc 3            # all but the faults
"""


# %% Imports
import argparse
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_tutorial.arguments import (
    Parser,
    init_method,
    output_file,
    positive_float,
    positive_int,
)
from ddp_tutorial.device import backend_for, choose_device
from ddp_tutorial.machines import bytes_sent, check_tcp, free_port
from ddp_tutorial.report import write_json


# %% Arguments
DEMOS = {}  # name: function
FAULTS = ("missing", "mismatch")


def demo(function):
    """Below, @demo stands above each function that can be chosen by its name."""
    DEMOS[function.__name__] = function
    return function


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = ["all", *DEMOS]
    add("demos", nargs="+", metavar="DEMO", choices=names, help=", ".join(names))
    add("--nproc", type=positive_int, default=2, help="processes, from 2 on (2)")
    add("--start", choices=["spawn", "process"], default="spawn", help="how to start them (spawn)")
    add("--init-method", type=init_method, default="env://",
        help="env://, tcp://HOST:PORT or file:///PATH (env://)")
    add("--late", type=positive_float, default=0.0, metavar="SECONDS",
        help="the last rank comes so much later (0)")
    add("--timeout", type=positive_float, default=60.0, metavar="SECONDS",
        help="how long to wait for each other (60)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="auto: a GPU for each process, else CPU")
    add("--json", type=output_file, metavar="FILE", help="write what happened to FILE")
    args = parser.parse_args()
    if args.nproc < 2:
        parser.error("--nproc 1: nobody to talk to, use 2 or more")
    if "all" in args.demos:
        args.demos = [name for name in DEMOS if name not in FAULTS]
    return args


# %% Start processes
UNSUPPORTED = ("not support", "Cannot use ReduceOp", "only implemented for")


def start_processes(args):
    if args.start == "spawn":
        mp.spawn(worker, args=(args,), nprocs=args.nproc)
    else:
        # The same by hand. Nobody ends the others when one fails: they wait until their timeout.
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=worker, args=(rank, args)) for rank in range(args.nproc)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit("a process failed, see above")


def worker(rank, args):
    """What every process runs."""
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, also while it waits for others
    join_process_group(rank, args)
    for name in args.demos:
        try:
            DEMOS[name]()
        except (RuntimeError, ValueError) as error:
            if not any(words in str(error) for words in UNSUPPORTED):
                raise
            # Refused by every rank before anything was sent, so the next demo can go on.
            tell(f"{name}: {error}")
    if rank == 0 and args.json:
        write_json(RECORDS, args.json)
    dist.destroy_process_group()


# %% Join the group
def join_process_group(rank, args):
    if args.late and rank == args.nproc - 1:
        time.sleep(args.late)
    device = choose_device(args.device, args.nproc, say=print if rank == 0 else None)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_default_device(device)  # every tensor made from here on is there
    start = time.perf_counter()
    # Blocks until all of world_size processes have called it, or until the timeout.
    dist.init_process_group(
        backend_for(device), init_method=args.init_method, rank=rank, world_size=args.nproc,
        timeout=timedelta(seconds=args.timeout))
    if args.late:
        waited = time.perf_counter() - start
        print(f"[rank {rank}] waited {waited:.1f} s for the others")


# %% Hello
@demo
def hello():
    """Every rank prints when it gets there: the lines of all ranks come in any order."""
    for number in range(3):
        print(f"[rank {dist.get_rank()}] hello {number}, I am one of {dist.get_world_size()}")
        time.sleep(0.01)


# %% Show
RECORDS = {}  # what --json writes
NOTHING = torch.empty(0)


def numbers(count, rank=None):
    """10, 11, 12 and so on for rank 0, 20, 21, 22 for rank 1, 40, 41, 42 for rank 2: [count]."""
    rank = dist.get_rank() if rank is None else rank
    return 10.0 * 2**rank + torch.arange(count)


def everybody(count):
    """The numbers of every rank, stacked: [world_size, count]."""
    return torch.stack([numbers(count, rank) for rank in range(dist.get_world_size())])


def in_rank_order(thing):
    """Rank 0 gets the list of what each rank passed here, the others get None."""
    things = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(thing, things)
    return things


def tell(text):
    """Rank 0 prints the first line of `text`, the others nothing."""
    if dist.get_rank() == 0:
        print(str(text).splitlines()[0])


def say(text):
    """Print every rank's text, in rank order."""
    for rank, line in enumerate(in_rank_order(text) or []):
        print(f"[rank {rank}] {line}")


def show(title, before, after, wanted):
    """Assert that this rank has what was wanted; print every rank's numbers, before and after."""
    assert torch.allclose(after, wanted), f"{title}: got {after.tolist()}, wanted {wanted.tolist()}"
    rows = in_rank_order((before.tolist(), after.tolist()))
    if rows:
        RECORDS[title] = rows
        print(title)
        for rank, (old, new) in enumerate(rows):
            print(f"[rank {rank}] {words(old):24} -> {words(new)}")


def words(values):
    return " ".join(f"{value:g}" for value in values) or "nothing"


# %% Send and receive
@demo
def send_recv():
    """Rank 0 has numbers for everyone else. Whoever sends or receives waits until that is done."""
    tensor = numbers(4)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=0)
    show("send and recv", numbers(4), tensor, wanted=numbers(4, rank=0))


# %% Without waiting
@demo
def isend_irecv():
    """The same, but the calls return at once, and `wait` does the waiting."""
    tensor = numbers(4)
    if dist.get_rank() == 0:
        works = [dist.isend(tensor, dst=other) for other in range(1, dist.get_world_size())]
    else:
        works = [dist.irecv(tensor, src=0)]
    # Until wait() has returned, do not change what is being sent, and do not touch what is coming.
    for work in works:
        work.wait()
    show("isend and irecv", numbers(4), tensor, wanted=numbers(4, rank=0))


@demo
def too_early():
    """Rank 0 changes the tensor between isend and wait; the receiver takes its time."""
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, dst=1)
        tensor.fill_(9)  # wrong: the message may not be on its way yet
        work.wait()
    elif dist.get_rank() == 1:
        time.sleep(1)
        dist.recv(tensor, src=0)
        print(f"[rank 1] was sent 1 1 1 1, has received {words(tensor.tolist())}")


# %% Ring
@demo
def ring():
    """Everyone sends to the right and receives from the left. With `send` and then `recv`, all
    might wait in `send`; handed in together, the messages cannot block each other."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.empty(4)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, numbers(4), right), dist.P2POp(dist.irecv, received, left)])
    for work in works:
        work.wait()
    show("ring", numbers(4), received, wanted=numbers(4, left))


# %% Ping-pong
@demo
def ping_pong():
    """A message goes from rank 0 to rank 1 and back. Half of the time that takes, by its size."""
    rank = dist.get_rank()
    seconds = {}
    for size in [2**power for power in range(3, 25, 3)]:  # 8 bytes to 16 MiB
        tensor = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(22):
            start = time.perf_counter()
            if rank == 0:
                dist.send(tensor, dst=1)
                dist.recv(tensor, src=1)
            elif rank == 1:
                dist.recv(tensor, src=0)
                dist.send(tensor, dst=0)
            tensor[0].item()  # a GPU works behind our back: reading from it waits for it
            times.append((time.perf_counter() - start) / 2)
        seconds[size] = statistics.median(times[2:])
    RECORDS["ping_pong"] = seconds
    for size, duration in seconds.items():
        tell(f"ping_pong: {size:>10,} bytes, {1e6 * duration:8.0f} microseconds one way")
    dist.barrier()


# %% Broadcast
@demo
def broadcast():
    """Everyone gets what rank 0 has."""
    tensor = numbers(4)
    dist.broadcast(tensor, src=0)
    show("broadcast", numbers(4), tensor, wanted=numbers(4, rank=0))


# %% Scatter and gather
@demo
def scatter():
    """Rank 0 deals out its numbers, a piece for each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hand = numbers(2 * world_size) if rank == 0 else NOTHING
    piece = torch.empty(2)
    dist.scatter(piece, list(hand.split(2)) if rank == 0 else None, src=0)
    show("scatter", hand, piece, wanted=numbers(2 * world_size, rank=0)[2 * rank : 2 * rank + 2])


@demo
def gather():
    """Rank 0 gets everybody's numbers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = [torch.empty(2) for _ in range(world_size)] if rank == 0 else None
    dist.gather(numbers(2), places, dst=0)
    after = torch.cat(places) if rank == 0 else NOTHING
    show("gather", numbers(2), after, wanted=everybody(2).flatten() if rank == 0 else NOTHING)


@demo
def all_gather():
    """Everyone gets everybody's numbers."""
    places = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(places, numbers(2))
    show("all_gather", numbers(2), torch.cat(places), wanted=everybody(2).flatten())


# %% Reduce
@demo
def reduce():
    """Rank 0 gets the sums. What the others then have in their tensor is of no use to anybody."""
    tensor = numbers(4)
    dist.reduce(tensor, dst=0)
    here = dist.get_rank() == 0
    wanted = everybody(4).sum(dim=0)
    show("reduce", numbers(4), tensor if here else NOTHING, wanted if here else NOTHING)


@demo
def all_reduce():
    """Everyone gets the sums. This is the one that DDP uses in every step."""
    tensor = numbers(4)
    dist.all_reduce(tensor)
    show("all_reduce", numbers(4), tensor, wanted=everybody(4).sum(dim=0))


@demo
def reduce_scatter():
    """The sums, dealt out: each rank gets its piece of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    piece = torch.empty(2)
    dist.reduce_scatter(piece, list(numbers(2 * world_size).split(2)))
    wanted = everybody(2 * world_size).sum(dim=0)[2 * rank : 2 * rank + 2]
    show("reduce_scatter", numbers(2 * world_size), piece, wanted)


# %% All to all
@demo
def all_to_all():
    """Everyone has a number for everyone: rank 2 gets the number 2 (from 0) of each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(world_size)
    dist.all_to_all_single(received, numbers(world_size))
    show("all_to_all", numbers(world_size), received, wanted=everybody(world_size)[:, rank])


# %% Operations
@demo
def operations():
    """all_reduce can do more than add."""
    expected = {
        "SUM": lambda rows: rows.sum(dim=0), "PRODUCT": lambda rows: rows.prod(dim=0),
        "MIN": lambda rows: rows.amin(dim=0), "MAX": lambda rows: rows.amax(dim=0)}
    for name, wanted in expected.items():
        tensor = numbers(4)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        show(f"all_reduce {name}", numbers(4), tensor, wanted(everybody(4)))


@demo
def average():
    """The operation that averages gradients. Gloo learnt it after PyTorch 2.6."""
    tensor = numbers(4)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    show("all_reduce AVG", numbers(4), tensor, wanted=everybody(4).mean(dim=0))


# %% Barrier
@demo
def barrier():
    """Nobody passes before the last has come."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    time.sleep(0.3 * rank)
    came = time.time()
    dist.barrier()
    passed = time.time()
    times = [None] * (last + 1)
    dist.all_gather_object(times, (came, passed))
    assert passed >= max(came for came, _ in times)
    say(f"barrier: waited for rank {last}: {passed - came > 0.15}")


# %% Objects
@demo
def objects():
    """Anything that can be pickled, for when it is small and speed does not matter."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = [{"lr": 0.1, "name": "from rank 0"} if rank == 0 else None]
    dist.broadcast_object_list(plan, src=0)
    assert plan == [{"lr": 0.1, "name": "from rank 0"}]
    found = [None] * world_size
    dist.all_gather_object(found, "x" * rank)
    assert found == ["x" * other for other in range(world_size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"task {number}" for number in range(world_size)], src=0)
    assert mine == [f"task {rank}"]
    say(f"objects: {plan[0]}, {found}, {mine[0]}")


# %% Groups
@demo
def groups():
    """Every other rank has a group of its own. All ranks must take part in making it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = list(range(0, world_size, 2))
    group = dist.new_group(members)
    tensor = numbers(4)
    wanted = numbers(4)
    if rank in members:
        dist.all_reduce(tensor, group=group)
        wanted = everybody(4)[members].sum(dim=0)
    show(f"all_reduce in the group {members}", numbers(4), tensor, wanted)
    say(f"groups: here I am rank {rank}, in the group {dist.get_rank(group)}")


# %% In the background
@demo
def async_op():
    """The call returns at once, and `wait` when the sum is there."""
    tensor = torch.full([4_000_000], float(dist.get_rank()))
    work = dist.all_reduce(tensor, async_op=True)
    early = not work.is_completed()
    # Time to compute something else, but not with this tensor.
    work.wait()
    world_size = dist.get_world_size()
    assert (tensor == sum(range(world_size))).all()
    say(f"async_op: the call returned before the sum was there: {early}")


# %% Backends
def from_0_to_1(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor, dst=1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, src=0)


@demo
def backends():
    """What this PyTorch was built with, and what the backend of this run can do, by trying."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(2)
    pieces = [torch.ones(2) for _ in range(world_size)]
    attempts = {
        "send, recv": lambda: from_0_to_1(one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "scatter": lambda: dist.scatter(one, pieces if rank == 0 else None, 0),
        "gather": lambda: dist.gather(one, pieces if rank == 0 else None, 0),
        "all_gather": lambda: dist.all_gather(pieces, one),
        "reduce": lambda: dist.reduce(one, 0),
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce_scatter": lambda: dist.reduce_scatter(one, pieces),
        "all_to_all": lambda: dist.all_to_all(pieces, [one for _ in pieces]),
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "the average": lambda: dist.all_reduce(one, dist.ReduceOp.AVG),
    }
    if rank == 0:
        for name in ("gloo", "nccl", "mpi"):
            there = "yes" if dist.is_backend_available(name) else "no"
            print(f"this PyTorch has {name}: {there}")
    for name, attempt in attempts.items():
        try:
            attempt()
            verdict = "yes"
        except (RuntimeError, ValueError) as error:
            verdict = f"no ({str(error).splitlines()[0]})"
        if rank == 0:
            print(f"{dist.get_backend()} can do {name}: {verdict}")


# %% Traffic
@demo
def traffic():
    """How much each rank sends: the operating system counts."""
    if dist.get_backend() != "gloo" or bytes_sent() is None:
        tell("traffic: it can be counted on Linux with Gloo only")
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(world_size, 100_000)
    pieces = list(tensor.clone())  # one for each rank
    calls = {
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "scatter": lambda: dist.scatter(pieces[0], pieces if rank == 0 else None, 0),
        "gather": lambda: dist.gather(tensor[rank], pieces if rank == 0 else None, 0),
        "all_gather": lambda: dist.all_gather(pieces, tensor[rank]),
        "reduce": lambda: dist.reduce(tensor, 0),
        "all_reduce": lambda: dist.all_reduce(tensor),
        "reduce_scatter": lambda: dist.reduce_scatter(pieces[0], list(tensor)),
        "all_to_all": lambda: dist.all_to_all_single(tensor, tensor.clone()),
    }
    for name, call in calls.items():
        dist.barrier()
        before = bytes_sent()
        call()
        sent = bytes_sent() - before
        dist.barrier()
        # In units of the whole tensor: what a rank sends when it sends everything once.
        shares = in_rank_order(sent / tensor.nbytes)
        if rank == 0:
            RECORDS.setdefault("traffic", {})[name] = shares
    if rank == 0:
        print("whole tensors sent by rank" + "".join(f"{other:6}" for other in range(world_size)))
        for name, shares in RECORDS["traffic"].items():
            print(f"{name:26}" + "".join(f"{share:6.2f}" for share in shares))


# %% Faults
@demo
def missing():
    """The last rank does not come. A monitored barrier finds out which one that was."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        time.sleep(4)
        return
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
    except RuntimeError as error:
        tell(error)


@demo
def mismatch():
    """Rank 0 wants to broadcast, the others to add up."""
    try:
        if dist.get_rank() == 0:
            dist.broadcast(numbers(4), src=0)
        else:
            dist.all_reduce(numbers(4))
    except RuntimeError as error:
        tell(error)
    time.sleep(1)  # so that all have their error before anyone leaves


# %% Main
def main():
    args = parse_args()
    # What would fail in every process is refused here, before there are any.
    choose_device(args.device, args.nproc, say=None)
    if args.init_method.startswith("tcp://"):
        check_tcp(args.init_method)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    start_processes(args)


if __name__ == "__main__":
    main()
