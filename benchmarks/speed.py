"""Compare speeds, each pair in one run, and print the ratios that README.md tells.

    make bench                                   all comparisons, half an hour or more on two cores
    python benchmarks/speed.py loop mixed        some of them
    python benchmarks/speed.py loop --pairs 3    a quick look

A machine is never equally fast twice. So the two sides of a comparison take turns, and the median of the pairs' ratios
is what counts; the smallest and largest are printed beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ddp_tutorial.cost import fit_cost_model
from ddp_tutorial.data import load_datasets
from ddp_tutorial.device import cpu_features, usable_cores

ROOT = Path(__file__).parents[1]
PAIRS = 7


class ArticlesNet(nn.Sequential):
    """The network as the articles wrote it: ReLU before the pool, channels first in memory."""

    def __init__(self):
        def block(channels_in, channels_out):
            return [nn.Conv2d(channels_in, channels_out, 5, 1, 2), nn.BatchNorm2d(channels_out), nn.ReLU(),
                    nn.MaxPool2d(2, 2)]

        super().__init__(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


def articles_recipe(threads, images, batch_size=100, warm_up=10):
    """images/s of the articles' loop: torchvision's ToTensor on each image, batches collated from them."""
    from torchvision.transforms.functional import to_pil_image, to_tensor

    torch.set_num_threads(threads)
    train_set, _ = load_datasets(limit=images, say=None)

    class OneByOne(torch.utils.data.Dataset):
        # What torchvision.datasets.MNIST with transform=ToTensor() does for every image.
        def __len__(self):
            return len(train_set)

        def __getitem__(self, index):
            return to_tensor(to_pil_image(train_set.images[index].numpy(), mode="L")), int(train_set.labels[index])

    torch.manual_seed(0)
    model = ArticlesNet()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    criterion = nn.CrossEntropyLoss()
    loader = torch.utils.data.DataLoader(OneByOne(), batch_size=batch_size, shuffle=True, num_workers=0)
    for step, (batch, labels) in enumerate(loader):
        if step == warm_up:
            start = time.perf_counter()
        loss = criterion(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (images - warm_up * batch_size) / (time.perf_counter() - start)


def script(name, *options, processes=1, core=None):
    """The report of a script's run. `core`: the number of one to run it on, or "rank" for a core for each process."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable]
        if name[:2] >= "03":
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if core is not None:
            launcher += ["benchmarks/on_core.py", str(core)]
        command = [*launcher, f"scripts/{name}.py", "--device", "cpu", "--json", f"{folder}/report.json", *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                       env=os.environ | {"PET_LOCAL_ADDR": "127.0.0.1"})
        return json.loads(Path(f"{folder}/report.json").read_text())


def images_per_second(*arguments, **options):
    return script(*arguments, **options)["images_per_second"]


def take_turns(sides, rounds):
    """Yield what each of `sides`, {name: function}, gives in every round: {name: images/s}."""
    for number in range(rounds):
        # Every other round the other way round, so that no side always runs on the warmer machine.
        yield {name: sides[name]() for name in (list(sides) if number % 2 == 0 else reversed(sides))}


def tell(what, ratios):
    """Print the median of some rounds' ratios, and their range."""
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{what}: {median:.2f} (from {least:.2f} to {most:.2f}, {len(ratios)} pairs)", flush=True)


def compare(what, first, second, pairs):
    """Print the median of first()/second() over interleaved pairs, and its range."""
    ratios = []
    for rates in take_turns({"first": first, "second": second}, pairs):
        ratios.append(rates["first"] / rates["second"])
        print(f"  {what}, pair {len(ratios)}: {rates['first']:,.0f} against {rates['second']:,.0f} images/s, "
              f"{ratios[-1]:.2f}", flush=True)
    tell(what, ratios)
    print()


def loop(pairs, limit):
    """Script 01 against the articles' recipe, float32, batch 100, as many threads."""
    threads = usable_cores()
    compare(f"script 01 to the articles' recipe, float32, {threads} threads",
            lambda: images_per_second("01_single_device", "--threads", str(threads), "--limit", str(limit)),
            lambda: subprocess_recipe(threads, limit), pairs)


def subprocess_recipe(threads, limit):
    """articles_recipe in a process of its own, as the script has one."""
    code = f"import speed; print(speed.articles_recipe({threads}, {limit}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True, text=True,
                          stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return float(done.stdout)


def mixed(pairs, limit):
    """bfloat16 against the articles' recipe (float32) and against float32 in our own script."""
    found = cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}
    print(f"instructions for bfloat16: {', '.join(sorted(found)) or 'none on this CPU'}")
    if not found:
        limit = min(limit, 3000)  # emulated, and slow
    threads = usable_cores()
    options = ["--threads", str(threads), "--limit", str(limit)]
    compare("script 04 in bfloat16 to the articles' recipe in float32",
            lambda: images_per_second("04_mixed_precision", "--amp", "bfloat16", *options),
            lambda: subprocess_recipe(threads, limit), pairs)
    compare("script 04, bfloat16 to float32",
            lambda: images_per_second("04_mixed_precision", "--amp", "bfloat16", *options),
            lambda: images_per_second("04_mixed_precision", *options), pairs)


def scaling(pairs, limit):
    """Two processes with a core each against one process with one core: 1.0 is twice as fast.

    Two that know nothing of each other are the measure of what the two cores can give at all.
    """
    for batch_size in (100, 400):
        # As many steps for each process, as the first steps of a training take longer: two share twice the images.
        images = min(30000, limit * batch_size // 100)
        options = ["--threads", "1", "--batch-size", str(batch_size), "--epochs", "2", "--limit"]
        sides = {
            "one": partial(images_per_second, "01_single_device", *options, str(images), core=0),
            "two": partial(images_per_second, "03_torchrun", *options, str(2 * images), processes=2, core="rank"),
            "independent": partial(independent, [*options, str(images)]),
        }
        rounds = []
        for rates in take_turns(sides, pairs):
            rounds.append(rates)
            print(f"  batch {batch_size}, round {len(rounds)}: "
                  + ", ".join(f"{name} {rates[name]:,.0f}" for name in sides) + " images/s", flush=True)
        tell(f"two processes to twice one process, batch {batch_size}", [r["two"] / r["one"] / 2 for r in rounds])
        tell(f"two independent processes to twice one process, batch {batch_size}",
             [r["independent"] / r["one"] / 2 for r in rounds])
        tell(f"two processes to two independent ones, batch {batch_size}",
             [r["two"] / r["independent"] for r in rounds])
        print()
    where_the_time_goes()


def independent(options):
    """images/s of two processes that know nothing of each other, together."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda core: images_per_second("01_single_device", *options, core=core), range(2)))


def where_the_time_goes():
    """A step with and without communication, and the step's collectives alone."""
    done = on_two_processes("benchmarks/on_core.py", "rank", "benchmarks/collectives.py", stdout=subprocess.PIPE)
    print(done.stdout)


def on_two_processes(*words, **options):
    """Run a program of this folder under torchrun; `options` are those of subprocess.run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, **options,
                          env=os.environ | {"PET_LOCAL_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)})


def by_hand(pairs, limit):
    """The stages of script 06 against DDP, and a cost model of the all-reduce against measurement."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "by_hand.json")
        on_two_processes("benchmarks/by_hand.py", "--rounds", str(pairs), "--json", path)
        times = {int(size): seconds for size, seconds in json.loads(path.read_text())["sizes"]["all_reduce"].items()}
    alpha, beta = fit_cost_model({size: times[size] for size in list(times)[::2]})
    print(f"all-reduce: {1e6 * alpha:.0f} microseconds + {1e9 * beta:.2f} ns a byte, fitted to every other size")
    for size in list(times)[1::2]:
        predicted = alpha + beta * size
        print(f"  {size:>10,} bytes: {1000 * predicted:6.2f} ms predicted, {1000 * times[size]:6.2f} measured")


def evaluation(pairs, limit):
    """Script 07: the 10,000 test images on two processes, against one process with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.pt"
        script("07_evaluation_and_batchnorm", "--limit", "1000", "--checkpoint", weights)

        def rate(processes):
            made = script("07_evaluation_and_batchnorm", "--threads", "1", "--evaluate", weights, processes=processes)
            return made["test_samples"] / made["seconds"]

        compare("evaluation on two processes to one", partial(rate, 2), partial(rate, 1), pairs)


def snapshots(pairs, limit):
    """Script 08 with a snapshot every 100 steps: the share of the training time that it stands still for them."""
    shares = []
    for number in range(pairs):
        done = on_two_processes("benchmarks/snapshots.py", "--device", "cpu", "--threads", "1", "--batch-size", "50",
                                "--limit", "20000", capture_output=True)
        line = next(line for line in done.stdout.split("\n") if "shares " in line)
        shares.append([float(word) for word in line.split("shares ")[1].split()])
        print(f"  run {number + 1}: snapshots {shares[-1][0]:.2%}, stop requests {shares[-1][1]:.2%}", flush=True)
    for name, values in zip(("a snapshot every 100 steps", "asking after every step whether to stop"), zip(*shares)):
        print(f"{name}: {statistics.median(values):.2%} of the training time"
              f" (from {min(values):.2%} to {max(values):.2%}, {pairs} runs)")


COMPARISONS = {"loop": loop, "scaling": scaling, "mixed": mixed, "by_hand": by_hand, "evaluation": evaluation,
               "snapshots": snapshots}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[*COMPARISONS, []], help="all without")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--limit", type=int, default=12000, help="images a run")
    args = parser.parse_args()
    print(f"{usable_cores()} cores, PyTorch {torch.__version__}\n")
    for name in args.which or COMPARISONS:
        COMPARISONS[name](args.pairs, args.limit)


if __name__ == "__main__":
    main()
