"""The command line that the training scripts share, and how they refuse what cannot work."""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from ddp_tutorial.model import NORMS


def refuse(message):
    """Print one line on standard error and end this process with exit status 2.

    A launcher ends all workers as soon as one has ended. So the first process of a machine speaks at once, and the
    others wait: usually they have been ended by then, and the line stands there once.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank != 0:
        time.sleep(3)
        message = f"[rank {os.environ.get('RANK', local_rank)}] {message}"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        refuse(f"{message} (--help lists the options)")


def positive_int(text):
    """A whole number from 1 on, for `add_argument(type=...)`."""
    return _number(text, int, 1, "a whole number of at least 1")


def non_negative_int(text):
    """A whole number from 0 on, for `add_argument(type=...)`."""
    return _number(text, int, 0, "a whole number of at least 0")


def positive_float(text):
    """A finite number above 0, for `add_argument(type=...)`."""
    return _number(text, float, sys.float_info.min, "a number above 0")


def _number(text, kind, smallest, wanted):
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not smallest <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return value


def output_file(text):
    """The path of a file to write, in a folder that is made here if need be, for `add_argument(type=...)`."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        message = f"cannot write {text} ({reason}): name a file in a folder you may write to"
        raise argparse.ArgumentTypeError(message) from None
    return path


def input_file(text):
    """The path of a file that can be read, for `add_argument(type=...)`."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"cannot read {text}: name a file that exists and that you may read")
    return path


def init_method(text):
    """Where processes meet, as `init_process_group` takes it, for `add_argument(type=...)`."""
    kind, _, rest = text.partition("://")
    wrong = ""
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            wrong = "write it as tcp://127.0.0.1:29500"
    elif kind == "file":
        path = Path(rest)
        if not path.is_absolute() or path.is_dir():
            wrong = "write it as file:///tmp/a_new_file"
        elif not os.access(path.parent, os.W_OK):
            wrong = "name a file in a folder that exists and that you may write to"
        elif path.exists() and path.stat().st_size:
            wrong = "there is a file already: delete it, or name a new one"
    elif text != "env://":
        wrong = "use env://, tcp://HOST:PORT or file:///PATH"
    if wrong:
        raise argparse.ArgumentTypeError(f"processes cannot meet at {text}: {wrong}")
    return text


def training_parser(doc, norms=NORMS):
    """The options of every training script; `doc` is the script's docstring, shown by `--help`."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set (1)")
    add("--batch-size", type=positive_int, default=100, help="images a step in EACH process (100)")
    add("--lr", type=positive_float, default=0.05, help="highest learning rate, after warm-up (0.05)")
    add("--seed", type=non_negative_int, default=0, help="of the initial weights and the shuffling (0)")
    add("--data", choices=["auto", "mnist", "printed"], default="auto",
        help="auto: MNIST, or printed digits where it cannot be had")
    add("--data-dir", type=Path, help="folder that holds MNIST/raw (DDP_TUTORIAL_DATA, else data)")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto",
        help="auto: a GPU for each process, else CPU")
    add("--threads", type=positive_int, help="CPU threads of each process (cores / processes of this machine)")
    add("--limit", type=positive_int, help="use the first so many images only")
    add("--width", type=positive_int, default=1, help="multiplies the model's channels (1)")
    add("--norm", choices=norms, default="batch", help="the model's normalisation (batch)")
    add("--dtype", choices=["float32", "float64"], default="float32", help="of the weights (float32)")
    add("--json", type=output_file, metavar="FILE", help="write what happened to FILE")
    add("--checkpoint", type=output_file, metavar="FILE", help="write the trained weights to FILE")
    add("--save-every", type=positive_int, default=1, metavar="N", help="epochs between checkpoints (1)")
    return parser


def load_data(args, say=print):
    """The training set and the test set that `args` asks for; one line and exit status 2 where there are none."""
    from ddp_tutorial.data import DataError, load_datasets

    try:
        return load_datasets(args.data, args.data_dir, args.limit, say=say)
    except DataError as error:
        refuse(str(error))
