"""Progress, speed and the JSON report of a training script."""

import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ddp_tutorial.arguments import refuse
from ddp_tutorial.device import backend_for
from ddp_tutorial.paths import project_root


class Speedometer:
    """Shows a progress bar over a training loop and measures its images/s, of all processes together.

    Args:
        device: waited for before the clock is read.
        global_batch_size: images a step, all processes together.
        show: whether this process shows the bar (rank 0 does).
        warm_up_steps: first steps of the training that are left out of the measurement.
    """

    def __init__(self, device, global_batch_size, show=True, warm_up_steps=10):
        self.device = device
        self.global_batch_size = global_batch_size
        self.show = show
        self.warm_up_steps = warm_up_steps
        self.images = 0
        self.seconds = 0.0

    def watch(self, loader, images, label):
        """Yield the batches of `loader`, an epoch of `images` images (all processes together) called `label`."""
        skip = min(self.warm_up_steps, len(loader) // 2)
        self.warm_up_steps = 0
        # A bar in a pipe is not erased but scrolls by, so there it is drawn less often.
        interval = 0.1 if sys.stdout.isatty() else 2
        bar = tqdm(loader, label, leave=False, disable=not self.show, file=sys.stdout, mininterval=interval)
        start = time.perf_counter()
        for step, batch in enumerate(bar):
            if step == skip:
                start = self._now()
            yield batch
        self.seconds += self._now() - start
        self.images += images - skip * self.global_batch_size

    @property
    def images_per_second(self):
        """Images per second of training, 0.0 before the first epoch."""
        return self.images / self.seconds if self.seconds else 0.0

    def _now(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize() if hasattr(torch, "accelerator") else torch.cuda.synchronize(self.device)
        return time.perf_counter()


def params_sha256(model):
    """SHA-256 over the bytes of the model's state dict (parameters and buffers), in its order, as hex digits."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_report(args, model, train_set, loss_sums, **details):
    """Write what a training did, as `make_report` puts it, to the file `args.json`; nothing where that is None.

    Ranks that ended with different weights, and a loss that is no number, are said in one line and end this process
    with exit status 2: nobody shall take such a training for a success.
    """
    if len(set(details.get("rank_params_sha256", [""]))) > 1:
        refuse("the ranks ended with different weights: give all machines the same options, data and version")
    losses = [*(sums.sum().item() for sums in loss_sums), details.get("test_loss", 0.0)]
    if not all(map(math.isfinite, losses)):
        refuse(f"the loss is no number any more: train with a smaller --lr than {args.lr:g}")
    if args.json is not None:
        write_json(make_report(args, model, train_set, loss_sums, **details), args.json)


def write_json(value, path):
    """Write `value` to the file at `path` (a Path) as JSON, in one rename: nobody ever finds half a file there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_report(args, model, train_set, loss_sums, *, device, world_size, test_accuracy, test_samples, speed, start,
                global_batch_size=None, **more):
    """What a training did, as a dict for `write_json`.

    Args:
        model: the plain model, not a wrapper around it.
        train_set: the training set, for its length and its source.
        loss_sums: a tensor a trained epoch: each step's loss, summed over all images of all processes, [steps].
        test_accuracy: share of the test images that are right, 0 to 1; `test_samples`: how many images that were.
        global_batch_size: images a step of all processes; `args.batch_size` times `world_size` where it is not given.
        speed: a Speedometer; `start`: when the training began, by `time.perf_counter()`, in seconds.
        more: further entries.
    """
    images = len(train_set)
    global_batch_size = global_batch_size or args.batch_size * world_size
    epochs = [sums.double().cpu() for sums in loss_sums]
    counts = torch.tensor([min(global_batch_size, images - first) for first in range(0, images, global_batch_size)])
    return {
        "script": Path(sys.argv[0]).name,
        "data": train_set.source,
        "device": device.type,
        "backend": backend_for(device),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "batch_size": args.batch_size,
        "global_batch_size": global_batch_size,
        "epochs": args.epochs,
        "steps": args.epochs * len(counts),
        "train_loss": [sums.sum().item() / images for sums in epochs],
        "step_loss": [loss for sums in epochs for loss in (sums / counts).tolist()],
        "test_accuracy": test_accuracy,
        "test_samples": test_samples,
        "seconds": time.perf_counter() - start,
        "images_per_second": speed.images_per_second,
        "params_sha256": params_sha256(model),
        "torch": torch.__version__,
        **more,
    }


def read_report(path):
    """The report at `path`, relative to the series' folder, as a dict. Raises ReportMissing."""
    path = project_root() / path
    if not path.is_file():
        raise ReportMissing(f"there is no report {path.name} so far: run the cell that launches its training")
    return json.loads(path.read_text())


class ReportMissing(FileNotFoundError):
    """Asked for a report before there is one; its text is the line to show."""

    def _render_traceback_(self):  # asked for by IPython
        return [f"{type(self).__name__}: {self}"]
