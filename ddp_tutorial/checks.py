"""Automatic checks of the exercises: ``check("build/exercises/02_shards.py")`` says what it got and what it wanted.

The reader's file runs in a process of its own, so that an endless loop ends and a crash leaves the notebook alone.
"""

import copy
import inspect
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from unittest import mock

from ddp_tutorial.paths import project_root

SECONDS = 20
RANK_SECONDS = 5  # how long one rank may wait for another


def check(path):
    """Print ``passed: N cases`` or ``not yet:`` and the first case that fails; never raises for what a reader wrote.

    path: the exercise's file, relative to the series' folder. Its name says which exercise it is. What the reader's
    code prints comes first (the first 2,000 characters).
    """
    path = project_root() / path
    if path.stem not in EXERCISES:
        print(f"not yet: there is no exercise {path.stem}; there are {', '.join(sorted(EXERCISES))}")
    elif not path.is_file():
        print(f"not yet: there is no file {path.name} so far; run the cell that writes it (it begins with %%part)")
    else:
        status, said = _run_apart([sys.executable, "-m", "ddp_tutorial.checks", path])
        if status == -signal.SIGALRM:
            print(f"not yet: no answer within {SECONDS} s; is there a loop that never ends?")
        elif status or not said:
            print(f"not yet: {path.name} ended its process (exit status {status}) before the last case")
        else:
            print(said, end="")


def _run_apart(command):
    """Exit status and output of a command; whatever it has started ends with it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=subprocess.DEVNULL, start_new_session=True,
                                 env=os.environ | {"PYTHONIOENCODING": "utf-8:replace"})
        try:
            status = child.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return status, output.read()


def main(path):
    """The child process: run the reader's file and the cases, print the verdict as the last line."""
    name, cases, needs_torch = EXERCISES[path.stem]
    if needs_torch:
        import torch  # noqa: F401  (before the clock starts: a slow import is not the reader's fault)
    signal.alarm(SECONDS)
    prints = _FirstCharacters()
    with redirect_stdout(prints):
        verdict = _judge(path, name, cases)
    signal.alarm(0)
    said = prints.getvalue()
    print(said + "\n" * bool(said and not said.endswith("\n")) + verdict, flush=True)
    os._exit(0)  # whatever threads the reader's code may have left


class _FirstCharacters(io.StringIO):
    """Keeps about 2,000 characters, however much is printed."""

    def write(self, text):
        return super().write(text[:2000]) if self.tell() < 2000 else len(text)


def _judge(path, name, cases):
    try:
        namespace = _executed(path)
    except SyntaxError as error:
        return f"not yet: {path.name} line {error.lineno}: {error.msg}"
    except BaseException as error:
        return f"not yet: {path.name} {_described(error, path)}"
    function = namespace.get(name)
    if not inspect.isfunction(function):
        return f"not yet: {path.name} defines no function {name}"
    number = 0
    for number, (call, run, wanted) in enumerate(cases(function), 1):  # noqa: B007 (counts the cases)
        try:
            got = run()
            if not same(got, wanted):
                return f"not yet: {call} gave {shown(got)}, wanted {shown(wanted)}"
        except RankTrouble as trouble:
            return f"not yet: {call} failed: {trouble}"
        except BaseException as error:
            return f"not yet: {call} {_described(error, path)}"
    return f"passed: {number} cases"


def _described(error, path):
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    message = " ".join(str(error).split())[:300]
    return f"raised {type(error).__name__}: {message}" + (f" (line {lines[-1]})" if lines else "")


def same(got, wanted):
    """Equal values of the wanted kind. Lists, tuples and ranges count as one kind; floats may be off by rounding."""
    if isinstance(wanted, (list, tuple, range)):
        alike = isinstance(got, (list, tuple, range)) and len(got) == len(wanted)
        return alike and all(map(same, got, wanted))
    if isinstance(wanted, float):
        number = isinstance(got, (int, float)) and not isinstance(got, bool)
        return number and math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(wanted, (bool, int, str)):
        return type(got) is type(wanted) and got == wanted
    import torch

    alike = isinstance(got, torch.Tensor) and got.shape == wanted.shape
    return alike and torch.allclose(got.double(), wanted.double(), rtol=1e-4, atol=1e-8)


def shown(value):
    """One short line for a value of the kinds that exercises take and give."""
    if isinstance(value, str):
        return value  # what a case observed, in words
    if isinstance(value, float):
        return f"{value:.1f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if type(value).__name__ == "Tensor":
        return f"tensor({shown(value.tolist())})"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:200] + " …"


def table(*cases):
    """Cases from pairs (arguments, wanted): the reader's function is called with a copy of the arguments."""

    def run(function):
        for arguments, wanted in cases:
            call = f"{function.__name__}({', '.join(map(shown, arguments))})"
            yield call, partial(function, *copy.deepcopy(arguments)), wanted

    return run


def accuracy_cases(function):
    import torch

    labels = torch.tensor([7, 2, 1, 0, 4, 1, 4, 9])
    for right in (8, 6, 0):
        said = torch.where(torch.arange(8) < right, labels, (labels + 1) % 10)
        logits = torch.nn.functional.one_hot(said, 10).float() * 3 - 1
        yield f"accuracy of 8 images, {right} of them right,", partial(function, logits, labels), right / 8
    one = torch.zeros(1, 10)
    yield "accuracy of 1 image, wrong,", partial(function, one, torch.tensor([9])), 0.0
    empty = (torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64))
    yield "accuracy of an empty batch", partial(function, *empty), 0.0


def average_cases(function):
    import torch

    two = [[torch.tensor([1.0, 2.0]), torch.tensor([[4.0]])], [torch.tensor([3.0, 6.0]), torch.tensor([[-4.0]])]]
    three = [[torch.tensor([3.0])], [torch.tensor([0.0])], [torch.tensor([-9.0])]]
    yield from table(
        ((two,), [torch.tensor([2.0, 4.0]), torch.tensor([[0.0]])]),
        ((three,), [torch.tensor([-2.0])]),
        ((two[:1],), two[0]),
    )(function)

    def afterwards():
        function(before := copy.deepcopy(two))
        return before

    yield "reading the input again after the call", afterwards, two


def atomic_save_cases(function):
    import torch

    class Unsaveable:
        def __reduce__(self):
            raise OSError("no space left on device")

    renames = []

    def watch(event, arguments):
        if event == "os.rename":
            source, target = (Path(os.fsdecode(name)).absolute() for name in arguments[:2])
            renames.append((source.parent == target.parent, target.exists()))

    sys.addaudithook(watch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pt")

        def save(state):
            function(state, path)
            return torch.load(path, weights_only=True)["epoch"] if path.exists() else "no file"

        def files():
            return ", ".join(sorted(file.name for file in Path(folder).iterdir()))

        def old_reader():
            with path.open("rb") as old:
                function({"epoch": 2, "weights": torch.ones(1000)}, path)
                return torch.load(old, weights_only=True)["epoch"]

        def fail():
            try:
                function({"epoch": 3, "broken": Unsaveable()}, path)
            except OSError:
                pass
            if not path.exists():
                return "no file"
            try:
                return f"epoch {torch.load(path, weights_only=True)['epoch']}"
            except Exception:
                return "a broken file"

        def fail_anew():
            path.unlink()
            return fail()

        yield "loading what was saved", partial(save, {"epoch": 0}), 0
        yield "loading what was saved over an older file", partial(save, {"epoch": 1}), 1
        yield "listing the folder after two saves", files, "snapshot.pt"
        yield "a save over epoch 1 that fails half-way", fail, "epoch 1"
        yield "reading on in the old file, opened before a save,", old_reader, 1
        rename = "a rename within the folder, over the old file"
        yield "the last step of a save", lambda: rename if renames[-1:] == [(True, True)] else "another way", rename
        yield "a first save that fails half-way", fail_anew, "no file"


def loss_scale_cases(function):
    import torch

    half = torch.finfo(torch.float16).max
    yield from table(
        (([torch.tensor([1.0])],), 32768.0),
        (([torch.tensor([0.25, 0.5]), torch.tensor([0.125])],), 65536.0),
        (([torch.tensor([1e-3]), torch.tensor([[2e-3, -5e-3]])],), 2.0**23),
        (([torch.tensor([0.0, half / 2**16])],), 65536.0),
        (([torch.tensor([100000.0])],), 0.5),
    )(function)


def clip_cases(function):
    import torch

    scaled = [torch.tensor([3.0, 0.0]) * 1024, torch.tensor([[4.0]]) * 1024]
    yield from table(
        ((scaled, 1024.0, 1.0), [torch.tensor([0.6, 0.0]), torch.tensor([[0.8]])]),
        ((scaled, 1024.0, 2.5), [torch.tensor([1.5, 0.0]), torch.tensor([[2.0]])]),
        ((scaled, 1024.0, 100.0), [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]),
        (([torch.tensor([-0.5]), torch.tensor([0.0])], 1.0, 0.25), [torch.tensor([-0.25]), torch.tensor([0.0])]),
    )(function)


class RankTrouble(Exception):
    """What went wrong on a rank, in words for the reader."""


def on_ranks(path, world_size, target):
    """What ``target(path)`` returns on each of `world_size` ranks. Raises RankTrouble."""
    from ddp_tutorial.ranks import RankFailed, run_on_ranks

    try:
        answers = run_on_ranks(world_size, _with_prints, target, path, seconds=RANK_SECONDS)
    except RankFailed as failure:
        lines = [line for name, line in failure.frames if name == path]
        where = f" (line {lines[-1]})" if lines else ""
        message = " ".join(str(failure).split())[:200]
        if "Timed out waiting" in message:  # Gloo's words
            message = f"rank {failure.rank} waited in vain for another rank"
        elif "ended without a result" in message:
            message += "; do those who send and those who receive have tensors of the same size?"
        raise RankTrouble(f"{message}{where}") from None
    for rank, (_, said) in enumerate(answers):
        for line in said.splitlines():
            print(f"[rank {rank}] {line}")
    return [answer for answer, _ in answers]


def _with_prints(target, path):
    prints = _FirstCharacters()
    with redirect_stdout(prints):
        answer = target(path)
    return answer, prints.getvalue()


class SendAndRecvOnly:
    """Stands for torch.distributed while a reader's function runs: counts rounds, and refuses the ready-made ways.

    A round is the time that one message takes; a rank sends or receives one message at a time. Each message is
    followed by the number of the round in which it was sent, so every rank knows in which round it is.
    """

    def __init__(self):
        import torch.distributed as dist

        self.rounds, self.really_send, self.really_recv = 0, dist.send, dist.recv
        refused = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
                   "all_to_all", "all_to_all_single", "isend", "irecv", "batch_isend_irecv", "all_gather_object",
                   "broadcast_object_list", "gather_object", "scatter_object_list", "reduce_scatter_tensor",
                   "all_gather_into_tensor", "send_object_list", "recv_object_list")
        stand_ins = {name: partial(self._refuse, name) for name in refused}
        self.patch = mock.patch.multiple(dist, create=True, send=self._send, recv=self._recv, **stand_ins)

    def __enter__(self):
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()

    @staticmethod
    def _refuse(name, *_, **__):
        raise RuntimeError(f"dist.{name} is not for this exercise: use dist.send and dist.recv")

    def _send(self, tensor, dst):
        import torch

        self.rounds += 1
        self.really_send(tensor, dst)
        self.really_send(torch.tensor([self.rounds]), dst)

    def _recv(self, tensor, src):
        import torch

        self.really_recv(tensor, src)
        sent_in = torch.zeros(1, dtype=torch.int64)
        self.really_recv(sent_in, src)
        self.rounds = max(self.rounds + 1, sent_in.item())


def defined_in(path, name):
    """The function `name` of the exercise at `path`, absolute or relative to the series' folder."""
    return _executed(project_root() / path)[name]


def _executed(path):
    """What the file at `path` (a Path) defines: {name: value}. Raises whatever its code raises."""
    namespace = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace


def all_reduce_on_rank(path):
    import torch
    import torch.distributed as dist

    function = defined_in(path, "all_reduce")
    tensor = 10.0 ** dist.get_rank() * torch.arange(1.0, 4.0)
    with SendAndRecvOnly():
        function(tensor)
    return tensor.tolist()


def all_reduce_cases(function):
    path = function.__globals__["__file__"]
    for world_size in (2, 3, 4):
        total = sum(10.0**rank for rank in range(world_size))
        wanted = [[total, 2 * total, 3 * total]] * world_size
        call = f"all_reduce on {world_size} ranks, that have [1, 2, 3], [10, 20, 30] and so on,"
        yield call, partial(on_ranks, path, world_size, all_reduce_on_rank), wanted


def broadcast_on_rank(path):
    import torch
    import torch.distributed as dist

    function = defined_in(path, "broadcast")
    tensor = torch.arange(3.0) + 10 * (dist.get_rank() + 1)
    with SendAndRecvOnly() as counting:
        function(tensor)
    return tensor.tolist(), counting.rounds


def broadcast_cases(function):
    path = function.__globals__["__file__"]
    for world_size, fewest in ((2, 1), (3, 2), (4, 2), (8, 3)):
        rounds = []

        def values(world_size=world_size, rounds=rounds):
            found = on_ranks(path, world_size, broadcast_on_rank)
            rounds += [rounds for _, rounds in found]
            return [values for values, _ in found]

        call = f"broadcast on {world_size} ranks"
        yield call, values, [[10.0, 11.0, 12.0]] * world_size
        yield f"the rounds of {call}", partial(max, rounds), fewest


def average_on_rank(path):
    import torch
    import torch.distributed as dist

    function = defined_in(path, "average_gradients")
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1))
    model[1].weight.requires_grad_(False)  # frozen: it has no gradient
    trained = [model[0].weight, model[1].bias]
    for number, parameter in enumerate(trained, 1):
        parameter.grad = torch.full_like(parameter, number * 12.0 * dist.get_rank())
    function(model)
    return [parameter.grad.flatten().tolist() for parameter in trained]


def average_on_ranks_cases(function):
    path = function.__globals__["__file__"]
    for world_size in (2, 3, 4):
        mean = 12.0 * sum(range(world_size)) / world_size
        call = f"average_gradients on {world_size} ranks, with gradients of 0, 12 … and of 0, 24 …,"
        yield call, partial(on_ranks, path, world_size, average_on_rank), [[[mean, mean], [2 * mean]]] * world_size


def exact_accuracy_on_rank(path, images, batch_size):
    """The accuracy, and how many images the model was shown."""
    import torch

    function, shown_images = defined_in(path, "accuracy"), []

    def model(batch):
        shown_images.append(len(batch))
        return batch

    labels = torch.arange(images) % 10
    said = torch.where(torch.arange(images) % 3 == 0, labels, (labels + 1) % 10)  # every third one is right
    share = function(model, torch.nn.functional.one_hot(said, 10).float(), labels, batch_size)
    return share, sum(shown_images)


def exact_accuracy_cases(function):
    path = function.__globals__["__file__"]
    for world_size, images, batch_size in ((2, 12, 3), (2, 7, 3), (3, 10, 4), (4, 2, 1)):
        wanted = [len(range(0, images, 3)) / images] * world_size
        call = f"accuracy of {images} images on {world_size} ranks, batches of {batch_size},"
        looked_at = []

        def shares(world_size=world_size, images=images, batch_size=batch_size, looked_at=looked_at):
            target = partial(exact_accuracy_on_rank, images=images, batch_size=batch_size)
            found = on_ranks(path, world_size, target)
            looked_at += [count for _, count in found]
            return [share for share, _ in found]

        yield call, shares, wanted
        yield f"the number of images that all ranks together looked at for the {call}", partial(sum, looked_at), images


def local_loss_on_rank(path, counts):
    """What one unit more of this rank's loss sum adds to the value for backward()."""
    import torch
    import torch.distributed as dist

    function = defined_in(path, "local_loss")
    rank = dist.get_rank()
    loss_sum = torch.tensor(float(rank + 1), requires_grad=True)
    (function(loss_sum, counts[rank]) * 1.0).backward()
    return loss_sum.grad.item()


def local_loss_cases(function):
    path = function.__globals__["__file__"]
    for counts in ([4, 4], [5, 3], [7, 1, 2], [3, 0]):
        call = f"the gradient of local_loss by loss_sum, where the ranks have {shown(counts)} samples,"
        run = partial(on_ranks, path, len(counts), partial(local_loss_on_rank, counts=counts))
        yield call, run, [len(counts) / sum(counts)] * len(counts)


def small_training(seed):
    """A model that draws random numbers, an optimizer with memory, and a schedule."""
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train_on(model, optimizer, scheduler, epoch=0, step=0, until=10):
    """Go on from `step` of `epoch`, of 2 epochs of 5 steps, until so many steps are done. Returns a snapshot."""
    import torch

    done = 5 * epoch + step
    while done < until:
        images = torch.randn(8, 4, generator=torch.Generator().manual_seed(done))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        scheduler.step()
        done += 1
    # Five steps of the first epoch are none of the second.
    return {"epoch": done // 5, "step": done % 5, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}


def resume_cases(function):
    import torch

    def resumed(step):
        """What `resume` returned, the parts that it was given, and the snapshot."""
        snapshot = copy.deepcopy(train_on(*small_training(seed=0), until=step))
        torch.manual_seed(99)
        parts = small_training(seed=1)
        return function(copy.deepcopy(snapshot), *parts), parts, snapshot

    def random_numbers():
        _, _, snapshot = resumed(3)
        return same_numbers if torch.equal(torch.get_rng_state(), snapshot["rng"]) else "others"

    def killed_after(step):
        (epoch, step), parts, _ = resumed(step)
        train_on(*parts, epoch, step)
        pairs = zip(parts[0].parameters(), whole.parameters())
        away = max((mine - wanted).abs().max().item() for mine, wanted in pairs)
        return f"weights that are off by {away:.1g}" if away else wanted

    yield "resume, from a snapshot of epoch 0 and step 3,", lambda: resumed(3)[0], (0, 3)
    same_numbers = "those of the snapshot"
    yield "looking at the next random numbers after resume", random_numbers, same_numbers
    wanted = "the weights of a training that was never killed"
    parts = small_training(seed=0)
    train_on(*parts)
    whole = parts[0]
    for step in (3, 5, 6, 9, 10):
        yield f"a training of 10 steps, killed after step {step} and resumed,", partial(killed_after, step), wanted


def launch_line_cases(function):
    names = {"training_script": "the script", "training_script_args": "what follows the script"}
    for cluster in (([1, 1], "node0", 29500), ([8, 8, 8], "10.0.0.7", 29400), ([2, 1], "gpu-1", 23456)):
        processes, address, port = cluster
        nodes = len(processes)
        for option, wanted in {
            "--nnodes": [str(nodes)] * nodes,
            "--node-rank": list(range(nodes)),
            "--nproc-per-node": [str(count) for count in processes],
            "--master-addr": [address] * nodes,
            "--master-port": [port] * nodes,
            "training_script": ["scripts/09_many_machines.py"] * nodes,
            # What would make torchrun do something else all the same.
            "training_script_args": [[]] * nodes,
            "--standalone": [False] * nodes,
            "--module": [False] * nodes,
            "--rdzv-backend": ["static"] * nodes,
            "--rdzv-endpoint": [""] * nodes,
        }.items():
            what = names.get(option, f"each line's {option}")
            call = f"{what}, as torchrun reads launch_lines{cluster!r},"
            yield call, partial(read_launch_lines, function, cluster, option), wanted


def read_launch_lines(function, cluster, option):
    """What torchrun's own parser takes from each line for this option."""
    from torch.distributed.run import get_args_parser

    found = []
    for line in function(*cluster):
        program = re.match(r"(?:\w+=\S* +)*(?:torchrun|python3? +-m +torch.distributed.run) ", line)
        if not program:
            raise ValueError(f"it does not begin with torchrun: {line}")
        words = shlex.split(line[program.end():])
        with redirect_stderr(io.StringIO()) as said:
            try:
                read = get_args_parser().parse_args(words)
            except SystemExit:
                raise ValueError(f"torchrun refuses it: {said.getvalue().strip().splitlines()[-1]}") from None
        found.append(getattr(read, option.lstrip("-").replace("-", "_")))
    return found


def batch_file_cases(function):
    from ddp_tutorial.sbatch import problems

    for nodes, gpus, cores, hours in ((2, 8, 64, 4), (4, 4, 48, 24), (16, 1, 12, 1)):
        call = f"batch_file({nodes}, {gpus}, {cores}, {hours})"
        run = partial(function, nodes, gpus, cores, hours)
        yield f"the linter, of {call},", lambda run=run: problems(run()), []
        yield f"whether srun starts the script in {call}", lambda run=run: bool(
            re.search(r"^srun\b(.*\\\n)*.*\bscripts/09_many_machines\.py\b", run(), re.MULTILINE)), True
        for option, wanted in {
            "nodes": str(nodes), "ntasks-per-node": str(gpus), "gpus-per-node": str(gpus),
            "cpus-per-task": str(cores // gpus), "time": f"{hours:02}:00:00", "signal": "B:USR1@120", "requeue": True,
            "array": "none",
        }.items():
            yield f"--{option}, as Slurm reads {call},", partial(read_option, run, option), wanted


def read_option(run, option):
    """An option of the batch file that `run()` returns, each of Slurm's spellings made one."""
    from ddp_tutorial.sbatch import read

    value = read(run()).get(option, "none")
    if option == "time" and re.fullmatch(r"\d:\d\d:\d\d", str(value)):
        return f"0{value}"
    return value.replace("SIGUSR1", "USR1") if option == "signal" else value


# File stem: the function's name, its cases, and whether they need PyTorch (which takes seconds to import).
EXERCISES = {
    "00_ranks": (
        "rank_of",
        table(((0, 0, 4), 0), ((0, 3, 4), 3), ((1, 0, 4), 4), ((1, 2, 4), 6), ((2, 1, 8), 17), ((5, 0, 1), 5)),
        False,
    ),
    "00_workers": (
        "workers",
        table(
            ((1, 2), [(0, 0, 0), (0, 1, 1)]),
            ((2, 2), [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]),
            ((3, 1), [(0, 0, 0), (1, 0, 1), (2, 0, 2)]),
            ((2, 3), [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5)]),
        ),
        False,
    ),
    "01_accuracy": ("accuracy", accuracy_cases, True),
    "01_steps": (
        "steps_per_epoch",
        table(
            ((60000, 100), 600),
            ((60000, 64), 938),
            ((60000, 64, True), 937),
            ((10, 16), 1),
            ((10, 16, True), 0),
            ((0, 100), 0),
        ),
        False,
    ),
    "02_shards": (
        "shard_indices",
        table(
            ((10, 3, 1), [1, 4, 7]),
            ((10, 3, 0), [0, 3, 6, 9]),
            ((10, 3, 2), [2, 5, 8]),
            ((8, 2, 1), [1, 3, 5, 7]),
            ((3, 1, 0), [0, 1, 2]),
            ((2, 4, 3), []),
        ),
        False,
    ),
    "02_average": ("average_gradients", average_cases, True),
    "03_resume": (
        "epochs_left",
        table(
            ((None, 3), range(0, 3)),
            ((0, 3), range(1, 3)),
            ((1, 3), range(2, 3)),
            ((2, 3), range(3, 3)),
            ((6, 3), range(3, 3)),
        ),
        False,
    ),
    "03_atomic_save": ("save_atomically", atomic_save_cases, True),
    "04_loss_scale": ("largest_safe_scale", loss_scale_cases, True),
    "04_clip": ("clip_scaled", clip_cases, True),
    "05_all_reduce": ("all_reduce", all_reduce_cases, True),
    "05_broadcast": ("broadcast", broadcast_cases, True),
    "06_average": ("average_gradients", average_on_ranks_cases, True),
    "06_step_seconds": (
        "step_seconds",
        table(
            (([1.0], [100], 0.5, 0.01), 2.5),  # one bucket
            (([1.0, 2.0], [0, 0], 0.25, 0.01), 2.25),  # hidden behind the backward pass
            (([1.0, 1.1, 1.2], [100, 100, 100], 0.0, 0.01), 4.0),  # they queue
            (([1.0, 5.0, 5.5], [100, 100, 50], 0.5, 0.01), 7.5),  # a pause in between
            (([0.1, 0.2, 0.3, 0.4], [10, 10, 10, 10], 1.0, 0.0), 4.1),  # alpha again and again
        ),
        False,
    ),
    "07_accuracy": ("accuracy", exact_accuracy_cases, True),
    "07_local_loss": ("local_loss", local_loss_cases, True),
    "08_resume": ("resume", resume_cases, True),
    "08_share": (
        "share",
        table(
            (([5, 3, 1, 0, 4, 2], 4, 0, 0, 2), [5, 1]),
            (([5, 3, 1, 0, 4, 2], 4, 0, 1, 2), [3, 0]),
            (([5, 3, 1, 0, 4, 2], 4, 1, 1, 2), [2]),
            (([5, 3, 1, 0, 4, 2], 4, 0, 2, 3), [1]),
            (([5, 3, 1, 0, 4, 2], 4, 1, 2, 3), []),
            (([5, 3, 1, 0, 4, 2], 3, 1, 0, 1), [0, 4, 2]),
        ),
        False,
    ),
    "09_launch_lines": ("launch_lines", launch_line_cases, True),
    "09_batch_file": ("batch_file", batch_file_cases, False),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
