# %% About
"""Train a small ConvNet on MNIST, in one process on one device.

python scripts/01_single_device.py                          # one GPU if there is one, else CPU
python scripts/01_single_device.py --device cpu --limit 6000
python scripts/01_single_device.py --epochs 3 --checkpoint build/01.pt
"""


# %% Imports
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ddp_tutorial.arguments import load_data, training_parser
from ddp_tutorial.device import choose_device, set_threads
from ddp_tutorial.model import ConvNet, warm_up_then_decay
from ddp_tutorial.report import Speedometer, write_report


# %% Arguments
def parse_args():
    parser = training_parser(__doc__)
    return parser.parse_args()


# %% Data
def make_loaders(args, device):
    train_set, test_set = load_data(args)
    shuffle = torch.Generator()
    sampler = RandomSampler(train_set, generator=shuffle)
    train_batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    test_batches = BatchSampler(SequentialSampler(test_set), batch_size=1000, drop_last=False)
    # batch_size=None: a sampler hands out whole batches, and the data set looks them up in one go.
    pin = device.type == "cuda"
    train_loader = DataLoader(train_set, batch_size=None, sampler=train_batches, pin_memory=pin)
    test_loader = DataLoader(test_set, batch_size=None, sampler=test_batches, pin_memory=pin)
    return train_loader, test_loader, shuffle


# %% Model
def make_model(args, device, steps):
    torch.manual_seed(args.seed)
    model = ConvNet(width=args.width, norm=args.norm).to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay(steps))
    return model, optimizer, scheduler


# %% Train one epoch
def train_one_epoch(model, batches, optimizer, scheduler, device):
    """One pass over the training set. Returns each step's loss, summed over its images: [steps]."""
    model.train()
    loss_sums = []
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss_sum = F.cross_entropy(model(images), labels, reduction="sum")
        loss = loss_sum / len(labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_sums.append(loss_sum.detach())
    return torch.stack(loss_sums)


# %% Evaluate
@torch.no_grad()
def evaluate(model, test_loader, device):
    """Returns the share of test images that the model gets right, and how many there were."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct = (predictions == labels.to(device)).sum()
        counts += torch.stack([correct, torch.tensor(len(labels), device=device)])
    correct, total = counts.tolist()
    return correct / total, total


# %% Save
def save_checkpoint(model, path):
    """Write the weights beside `path`, then rename: nobody ever finds half a file there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(model.state_dict(), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # where the disk was full


# %% Main
def train(args, device):
    train_loader, test_loader, shuffle = make_loaders(args, device)
    model, optimizer, scheduler = make_model(args, device, args.epochs * len(train_loader))
    images = len(train_loader.dataset)
    speed = Speedometer(device, args.batch_size)
    start = time.perf_counter()
    loss_sums = []
    for epoch in range(args.epochs):
        shuffle.manual_seed(args.seed + epoch)
        batches = speed.watch(train_loader, images, f"epoch {epoch + 1}")
        loss_sums.append(train_one_epoch(model, batches, optimizer, scheduler, device))
        accuracy, tested = evaluate(model, test_loader, device)
        loss = loss_sums[-1].sum().item() / images
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f},"
              f" {accuracy:.2%} of {tested:,} right, {speed.images_per_second:,.0f} images/s")
        if args.checkpoint and (epoch + 1) % args.save_every == 0:
            save_checkpoint(model, args.checkpoint)
    write_report(
        args, model, train_loader.dataset, loss_sums, device=device, world_size=1,
        test_accuracy=accuracy, test_samples=tested, speed=speed, start=start)


def main():
    sys.stdout.reconfigure(line_buffering=True)
    args = parse_args()
    device = choose_device(args.device)
    set_threads(args.threads)
    train(args, device)


if __name__ == "__main__":
    main()
