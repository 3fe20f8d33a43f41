"""Downloads MNIST with torchvision, in a process of its own: `python -m ddp_tutorial.download FOLDER [MIRROR]`

`ddp_tutorial.data` starts it, so that no process that trains imports torchvision, and so that a connection that
hangs can be ended from outside. It ends when its standard input closes: when its parent dies, however that
happens. If it fails, its exit status is 1 and its last line of output says why.
"""

import os
import queue
import socket
import sys
import threading
import urllib.request

MIRRORS = ["https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"]  # torchvision's own
ANSWER_LIMIT = 4  # seconds for one of the mirrors, all asked at once, to send the first byte
SOCKET_LIMIT = 8  # seconds for one operation on a connection


def fastest_first(mirrors):
    """The mirrors, the first to answer in front. OSError if none does within ANSWER_LIMIT.

    Asked in threads, because a slow name server or an address that swallows packets heeds no time limit.
    """
    answers = queue.Queue()

    def ask(mirror):
        try:
            with urllib.request.urlopen(mirror + "t10k-labels-idx1-ubyte.gz") as response:
                answers.put((mirror, None if response.read(1) else "an empty answer"))
        except Exception as error:
            answers.put((mirror, getattr(error, "reason", error)))

    def give_up():
        answers.put((None, f"no answer within {ANSWER_LIMIT} s"))

    for mirror in mirrors:
        threading.Thread(target=ask, args=(mirror,), daemon=True).start()
    timer = threading.Timer(ANSWER_LIMIT, give_up)
    timer.daemon = True
    timer.start()
    for _ in mirrors:
        mirror, problem = answers.get()
        if problem is None:
            return [mirror, *(other for other in mirrors if other != mirror)]
        if mirror is None:
            break
    raise OSError(problem)


def download(folder, mirror=None):
    """The four files of MNIST, packed and unpacked, into folder/MNIST/raw. The output and the files grow for as long
    as something moves, which is how the parent tells a slow download from one that hangs."""
    socket.setdefaulttimeout(SOCKET_LIMIT)
    mirrors = fastest_first([mirror.rstrip("/") + "/"] if mirror else MIRRORS)
    loaded = threading.Event()

    def tick():
        while not loaded.wait(1):
            print(f"{mirrors[0]} answers, loading torchvision", flush=True)

    threading.Thread(target=tick, daemon=True).start()
    from torchvision.datasets import MNIST

    loaded.set()
    MNIST.mirrors = mirrors
    if mirror:  # may serve files that were packed again; the parent checks them unpacked
        MNIST.resources = [(name, None) for name, _ in MNIST.resources]
    MNIST(folder, download=True)


def end_with_parent():
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        download(*sys.argv[1:])
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__, flush=True)
        os._exit(1)  # at once, whatever the other threads still wait for
    os._exit(0)
