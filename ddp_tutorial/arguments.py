"""The command line that the training scripts share, and how they refuse what cannot work."""

import argparse
import contextlib
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
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        time.sleep(3)
        message = f"[rank {os.environ.get('RANK', local_rank)}] {message}"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and that wants a file of its own for each output."""

    def parse_args(self, *arguments):
        args = super().parse_args(*arguments)
        outputs = {}
        for action in self._actions:
            path = getattr(args, action.dest, None)
            if action.type in (output_file, output_folder) and path is not None:
                other = outputs.setdefault(path, action.option_strings[0])
                if other != action.option_strings[0]:
                    self.error(f"{other} and {action.option_strings[0]} name the same {path}: give each its own")
        return args

    def error(self, message):
        refuse(f"{message} (--help lists the options)")


LARGEST = 10**9  # of the whole numbers: beyond it PyTorch, or the machine, would give up later and less clearly


def positive_int(text):
    """A whole number from 1 to LARGEST, for `add_argument(type=...)`."""
    return _whole_number_from(1, text)


def non_negative_int(text):
    """A whole number from 0 to LARGEST, for `add_argument(type=...)`."""
    return _whole_number_from(0, text)


def whole_number(largest, smallest=1):
    """A type for `add_argument`: whole numbers from `smallest` to `largest`."""

    def parse(text):
        return _number(text, int, smallest, largest, f"a whole number from {smallest} to {largest:,}")

    return parse


port_number = whole_number(65535)


def positive_float(text):
    """A finite number above 0, for `add_argument(type=...)`."""
    return _number(text, float, sys.float_info.min, sys.float_info.max, "a number above 0")


def _whole_number_from(smallest, text):
    value = _number(text, int, smallest, math.inf, f"a whole number of at least {smallest}")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is too large: {LARGEST:,} is the largest that makes sense")
    return value


def _number(text, kind, smallest, largest, wanted):
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not smallest <= value <= largest:
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return value


@contextlib.contextmanager
def _one_line_where_it_fails(what, remedy):
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{what} ({reason}): {remedy}") from None


def output_file(text):
    """The path of a file to write, in a folder that is made here if need be, for `add_argument(type=...)`."""
    with _one_line_where_it_fails(f"cannot write {text}", "name a file in a folder you may write to"):
        path = Path(text).expanduser().resolve()  # a link stays, and what it leads to is written
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OSError("it is a folder")
        if path.exists() and not path.is_file():  # renaming a file to /dev/null would replace it
            raise OSError("it is no ordinary file")
        # What is written first has a longer name.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp"):
            pass
    return path


def output_folder(text):
    """The path of a folder to write files in, made here if need be, for `add_argument(type=...)`."""
    with _one_line_where_it_fails(f"cannot write into {text}", "name a folder that you may write to"):
        path = Path(text).expanduser().resolve()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    return path


def data_folder(text):
    """The path of a folder, which need not exist yet, for `add_argument(type=...)`."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        path = None
    if not text or path is None or path.is_file():
        raise argparse.ArgumentTypeError(f"'{text}' is no folder: name one")
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
    add("--lr", type=positive_float, default=0.05,
        help="highest learning rate; a training of fewer than 300 steps does not reach it (0.05)")
    add("--seed", type=non_negative_int, default=0, help="of the initial weights and the shuffling (0)")
    add("--data", choices=["auto", "mnist", "printed"], default="auto",
        help="auto: MNIST, or printed digits where it cannot be had")
    add("--data-dir", type=data_folder, help="folder that holds MNIST/raw (DDP_TUTORIAL_DATA, else data)")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto",
        help="auto: a GPU for each process, else CPU")
    add("--threads", type=whole_number(1024), help="CPU threads of each process (cores / processes of this machine)")
    add("--limit", type=positive_int, help="use the first so many images only, for training and for testing")
    add("--width", type=whole_number(1024), default=1, help="multiplies the model's channels (1)")
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
