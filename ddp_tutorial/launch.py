"""What ``%launch`` and ``%%launch`` do: run commands as a person would in a terminal at the repository's root.

`supervisor.py`, which runs as a process of its own, starts the commands and ends them; this side streams what they
print into the notebook and says in one line what went wrong.
"""

import codecs
import contextlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from ddp_tutorial import supervisor
from ddp_tutorial.paths import build_dir, project_root

DEADLINE = 120.0  # seconds
MAX_LINES = 1000
MAX_CHARACTERS = 200 * MAX_LINES
MAX_LOG_BYTES = 100_000_000
KEPT_LOGS = 50
IDLE = 0.2  # seconds after which a line without an end, such as a progress bar, is shown as it is
USAGE = "%launch [--deadline SECONDS] [--expect-failure] COMMAND, or %%launch with one command a line below it"
SHELL_WORDS = {"|", "||", "|&", "&", "&&", ";", "<", "<<", "<<<", ">", ">>", ">|", "2>", "2>>", "2>&1", "1>", "&>"}


class LaunchError(Exception):
    """A command that failed or was refused; its text is the line to show."""

    def _render_traceback_(self):  # asked for by IPython: the stack is ours, not the reader's
        return [f"{type(self).__name__}: {self}"]


class LaunchInterrupted(KeyboardInterrupt):
    """The reader interrupted a launch; everything it had started has ended."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class Command(NamedTuple):
    shown: str  # as a person would type it
    words: list  # program and arguments
    env: dict  # what it changes in the environment


def launch(line, cell=None, names=None):
    """Run the command in `line`, or the commands in `cell`, one a line, together; stream what they print.

    ``{name}`` stands for the value of that name in the dictionary `names`; nothing else is expanded, and there is no
    shell. Raises LaunchError when a command fails or is refused, or passes its deadline; LaunchInterrupted on Ctrl-C.
    """
    try:
        deadline, expect_failure, commands = _understand(line, cell, names or {})
        commands = [command._replace(words=_with_program(command.words)) for command in commands]
    except LaunchError:
        print("%launch: refused, nothing was started")
        raise
    run = _Run(commands, deadline)
    run.go()
    if run.interrupted:
        print("interrupted: everything that this launch had started was ended", flush=True)
        raise LaunchInterrupted("the launch was interrupted")
    reason = run.why_it_failed()
    if expect_failure:
        if reason is None:
            raise LaunchError("the command was expected to fail, but it succeeded (exit status 0)")
        print(f"failed, as expected: {reason}", flush=True)
    elif reason is not None:
        run.show_first_traceback()
        raise LaunchError(reason)


# -------------------------------------------------------------------------------------------- from text to commands


def _understand(line, cell, names):
    """Returns deadline in seconds, whether failure is expected, and the commands as they were typed."""
    deadline, expect_failure = DEADLINE, False
    rest = _fill_in(line, names).strip()
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        option, _, value = option.partition("=")
        rest = rest.lstrip()
        if option == "--expect-failure" and not value:
            expect_failure = True
        elif option == "--deadline":
            if not value:
                value, _, rest = rest.partition(" ")
            if not re.fullmatch(r"\d+(\.\d*)?", value) or float(value) == 0:
                raise LaunchError(f'--deadline takes a number of seconds above 0, not "{value}"')
            deadline, rest = float(value), rest.lstrip()
        else:
            raise LaunchError(f"no option {option}; it reads {USAGE}")
    if cell is None:
        lines = [rest]
    elif rest:
        raise LaunchError(f"the commands of %%launch stand below its first line; move this there: {rest}")
    else:
        lines = re.sub(r"\s*\\\n\s*", " ", _fill_in(cell, names)).splitlines()
    lines = [each.strip() for each in lines]
    commands = [_parse(each) for each in lines if each and not each.startswith("#")]
    if not commands:
        raise LaunchError(f"no command; it reads {USAGE}")
    return deadline, expect_failure, commands


def _fill_in(text, names):
    return re.sub(r"\{([^\W\d]\w*)\}", lambda match: str(names.get(match[1], match[0])), text)


def _parse(text):
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{str(error).lower()} in: {text}") from None
    for word in words:
        if word in SHELL_WORDS:
            raise LaunchError(f'there is no shell here to understand "{word}"; give one plain command a line')
    env = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    if not words:
        raise LaunchError(f"no command after the variables: {text}")
    return Command(text, words, env)


def _bin_folder():
    return os.path.dirname(sys.executable)  # not resolved: a virtual environment's python is a link


def _with_program(words):
    """`words` with its first replaced by the program's path, in the kernel's own environment first."""
    name, *rest = words
    if name in ("python", "python3"):
        return [sys.executable, *rest]
    if name == "torchrun" and not os.access(os.path.join(_bin_folder(), name), os.X_OK):
        return [sys.executable, "-m", "torch.distributed.run", *rest]
    path = str(project_root() / name) if "/" in name else shutil.which(name, path=_environment()["PATH"])
    if path is None or not os.access(path, os.X_OK) or os.path.isdir(path):
        if name.startswith("{"):
            raise LaunchError(f"there is no variable {name[1:].split('}')[0]} so far: run the cell that defines it")
        if name.endswith(".py"):
            raise LaunchError(f"{name} is a script, not a program: put python, or torchrun, before it")
        raise LaunchError(f"there is no program {name}")
    return [path, *rest]


# ------------------------------------------------------------------------------------------------- the environment


def _environment():
    """The kernel's environment as a terminal would have it."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([_bin_folder(), env.get("PATH", os.defpath)])
    for name in ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):  # Jupyter sets them, and tracebacks turn colourful
        env.pop(name, None)
    if env.get("MPLBACKEND", "").startswith("module://"):  # Jupyter's own, of no use to a script
        del env["MPLBACKEND"]
    env.setdefault("PYTHON_COLORS", "0")
    return env


def _settings(commands):
    """For each command, the environment variables that the reader would set by hand, unless the reader did."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // len(commands))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    settings = []
    for command in commands:
        # Waiting threads sleep: else they keep the cores from whatever else runs, and training crawls.
        wanted = {"OMP_WAIT_POLICY": "PASSIVE"}
        if "OMP_NUM_THREADS" not in os.environ | command.env:
            # The first is for every program; the second lets our scripts divide by the processes that they start
            # themselves, which cannot be seen here, and tells them that the reader has not chosen the first.
            wanted["OMP_NUM_THREADS"] = str(max(1, share // _processes(command.words, share)))
            wanted["DDP_TUTORIAL_CORES"] = str(share)
        if _on_one_machine(command):
            # torchrun looks up the machine's own name, which takes minutes where it is unknown (a laptop offline).
            wanted["PET_LOCAL_ADDR"] = "127.0.0.1"
            if loopback:
                wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        settings.append({name: value for name, value in wanted.items() if name not in os.environ} | command.env)
    return settings


def _values(words, *options):
    """The values of `options`, given without dashes, in `words`: ``--a-b 1``, ``--a_b 1``, ``--a-b=1``."""
    found = []
    for word, following in zip(words, words[1:] + [""]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") in options:
            found.append(value if equals else following)
    return found


def _processes(words, cores):
    value = (_values(words, "nproc-per-node", "nproc") or ["1"])[-1]
    return int(value) if value.isdigit() and int(value) else cores  # "auto", "cpu", "gpu": let each have one core


def _on_one_machine(command):
    addresses = _values(command.words, "master-addr", "rdzv-endpoint", "init-method")
    env = {**os.environ, **command.env}
    addresses += [env[name] for name in ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT") if name in env]
    hosts = [re.sub(r"^\w+://", "", address) for address in addresses if not address.startswith(("file:", "env:"))]
    return all(re.match(r"(localhost|127\.[\d.]+|\[?::1\]?)(:\d*)?(/.*)?$|$", host) for host in hosts)


# ------------------------------------------------------------------------------------------------ running and ending


class _Run:
    """One launch, from start to end; afterwards it knows how it ended."""

    def __init__(self, commands, deadline):
        self.commands, self.deadline = commands, deadline
        self.interrupted = self.late = self.done = False
        self.failure = None  # the event of the first command that failed
        self.findings = _Findings()
        self.log = _Log(commands[0].words)
        self.screen = _Screen(self.log.name)

    def go(self):
        for number, command in enumerate(self.commands, 1):
            self.screen.show(f"{self._prefix(number)}$ {command.shown}\n")
        with self.log, self._interrupts_only_noted():
            self._supervise()

    def _prefix(self, number):
        return f"[{number}] " if len(self.commands) > 1 else ""

    @contextlib.contextmanager
    def _interrupts_only_noted(self):
        """However often the reader interrupts, ending the processes is not itself interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: setattr(self, "interrupted", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before or signal.default_int_handler)

    def _supervise(self):
        mark = uuid.uuid4().hex
        pipes = [os.pipe() for _ in self.commands]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__], bufsize=0, env=_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.file,
                pass_fds=[write for _, write in pipes], start_new_session=True,
            )
        finally:
            for _, write in pipes:
                os.close(write)
        order = {"mark": mark, "deadline": self.deadline, "commands": [
            {"argv": command.words, "env": env, "output": write, "cwd": str(project_root())}
            for command, env, (_, write) in zip(self.commands, _settings(self.commands), pipes)
        ]}
        streams = {read: _Stream(self, number) for number, (read, _) in enumerate(pipes, 1)}
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
            self._follow(process, streams)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            if not self.done:  # the supervisor was killed, or could not finish
                process.kill()
                supervisor.kill_family(mark)
            process.wait()
            process.stdout.close()
            self._drain(streams)
            for read in streams:
                os.close(read)

    def _follow(self, process, streams):
        """Stream until the supervisor has ended, or has not ended although it was told to."""
        events, give_up = b"", None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            for read in streams:
                selector.register(read, selectors.EVENT_READ)
            while give_up is None or time.monotonic() < give_up:
                # The supervisor's news first: what a command prints after its deadline is for the log only.
                ready = sorted(selector.select(0.1), key=lambda item: item[0].fileobj is not process.stdout)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if key.fileobj is not process.stdout:
                        streams[key.fd].take(data)
                        if not data:
                            selector.unregister(key.fd)
                    elif data:
                        *lines, events = (events + data).split(b"\n")
                        for line in lines:
                            self._hear(json.loads(line))
                    else:
                        return
                for stream in streams.values():
                    stream.show_when_idle()
                if self.interrupted and give_up is None:
                    self.screen.off = True
                    process.stdin.close()
                    give_up = time.monotonic() + 4

    def _hear(self, news):
        if news["event"] == "done":
            self.done = True
        elif news["event"] == "deadline":
            self.late = self.screen.off = True
        elif news["status"] != 0 and self.failure is None and not self.late:
            self.failure = news

    def _drain(self, streams):
        """Take what is still in the pipes; nobody is left to write more, save a process that nothing can kill."""
        for read, stream in streams.items():
            os.set_blocking(read, False)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(read, 1 << 16):
                    stream.take(data)
            stream.end()

    def why_it_failed(self):
        """One line, or None when every command succeeded."""
        if self.late:
            return (f"no end within {self.deadline:g} s, so everything was ended; either it needs longer (--deadline"
                    " SECONDS), or ranks wait for each other: do all make the same collectives in the same order?")
        if self.failure is None:
            return None if self.done else "the supervising process was killed, so everything was ended"
        status, index = self.failure["status"], self.failure["index"]
        which = f"command {index + 1}: " if len(self.commands) > 1 else ""
        how = _how_it_ended(status)
        details = self.failure.get("error") or self.findings.reason(index + 1)
        return self.screen.clean(f"{which}{how}{': ' if details else ''}{details}")

    def show_first_traceback(self):
        """Show it once more where it is not the last thing on the screen."""
        found = self.findings.first()
        if found and (self.screen.full or self.findings.lines_since(found) > 10):
            rank = "" if found.rank is None else f", rank {found.rank}"
            self.screen.say("\n".join([f"\nThe first failure's own traceback{rank}:", *found.lines]) + "\n")


def _how_it_ended(status):
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


# -------------------------------------------------------------------------------------------------- output as shown


class _Stream:
    """What one command prints, from bytes to pieces that end with a newline or a carriage return."""

    def __init__(self, run, number):
        self.run, self.number, self.prefix = run, number, run._prefix(number)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.fragment, self.line, self.at_start, self.last = "", "", True, 0.0

    def take(self, data):
        self._take(self.decoder.decode(data))

    def _take(self, text):
        if not text:
            return
        *pieces, self.fragment = re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.fragment + text)
        self.last = time.monotonic()
        for piece in pieces:
            self._show(piece)
        if len(self.fragment) > 10_000:
            self._show_fragment()

    def show_when_idle(self):
        if self.fragment and not self.prefix and time.monotonic() - self.last > IDLE:
            self._show_fragment()

    def end(self):
        self._take(self.decoder.decode(b"", final=True))
        self._show_fragment()
        if not self.at_start:
            self._show("\n")

    def _show_fragment(self):
        piece, self.fragment = self.fragment, ""
        if piece:
            self._show(piece)

    def _show(self, piece):
        prefixed = (self.prefix if self.at_start else "") + piece
        self.at_start = piece.endswith(("\n", "\r"))
        self.run.log.write(prefixed)
        self.run.screen.show(prefixed)
        self.line = (self.line + piece)[-10_000:]
        if self.at_start:
            self.run.findings.take(self.number, self.line.rstrip("\r\n"))
            self.line = ""


class _Screen:
    """The notebook cell: cleaned of what differs from one machine and run to the next, and of limited length."""

    def __init__(self, log_name):
        self.log_name, self.clean = log_name, _cleaner()
        self.lines = self.characters = 0
        self.full = self.off = False

    def show(self, text):
        if self.off or self.full:
            return
        if self.lines >= MAX_LINES or self.characters >= MAX_CHARACTERS:
            self.full = True
            self.say(f"(this is long: the rest is in {self.log_name})\n")
            return
        self.lines += text.count("\n")
        self.characters += len(text)
        self.say(text)

    def say(self, text):
        sys.stdout.write(self.clean(text))
        sys.stdout.flush()


def _cleaner():
    """A function that replaces paths, process ids and times by short stand-ins."""
    places = {}
    paths = sysconfig.get_paths()
    for path, name in [
        (project_root(), "."), (paths["purelib"], "<site-packages>"), (paths["platlib"], "<site-packages>"),
        (paths["stdlib"], "<python>"), (paths["scripts"], "<bin>"), (sys.prefix, "<env>"),
        (tempfile.gettempdir(), "<tmp>"), (Path.home(), "~"),
    ]:
        for each in (str(path), os.path.realpath(path), os.path.relpath(path, project_root())):
            if not each.startswith("..") and each not in (".", "/", "/usr", "/usr/local", "/opt"):
                places.setdefault(each, name)
    longest_first = sorted(places, key=len, reverse=True)
    anywhere = re.compile(rf"(?<![\w.~-])({'|'.join(map(re.escape, longest_first))})(?![\w-])(?!\.\w)(/(?=[\w.])|)")
    host = re.escape(socket.gethostname())
    rules = [
        # Harmless, and only where the machine's own name is unknown, such as on a laptop offline.
        (r"^(?:\[\d+\] )?\[W[^\n]* The hostname of the client socket cannot be retrieved\.[^\n]*\n", ""),
        (r"(<tmp>/(?:tmp|torchelastic_))[a-z0-9_]{8}\b", r"\1..."),
        (r"(?<!\w)(pid\s*[:= ]\s*)\d+", r"\1<pid>"),
        (r"(?<=Sending process )\d+|(?<=Terminating process )\d+", "<pid>"),
        (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:_[a-z0-9_]{8}\b)?", "<id>"),
        (r"\b([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +(?:\d+ +)*", r"\1 "),
        (r"\b\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?", "<time>"),
        (r"^(\s*host\s*: ).*", r"\1<host>"),
        (rf"\[{host}\](?=:\d)", "[<host>]"),
        (r"\b0x[0-9a-fA-F]{6,}", "0x..."),
    ]
    rules = [(re.compile(pattern, re.IGNORECASE | re.MULTILINE), new) for pattern, new in rules]

    def stand_in(match):
        new = places[match[1]] + match[2]
        return "" if new == "./" else new  # scripts/x.py, not ./scripts/x.py

    def clean(text):
        text = anywhere.sub(stand_in, text)
        for pattern, new in rules:
            text = pattern.sub(new, text)
        return text

    return clean


class _Log:
    """Everything that a launch printed, as it was, in ``build/logs``; the newest ones are kept."""

    def __init__(self, words):
        script = next((word for word in words if word.endswith(".py")), words[0])
        stem = re.sub(r"[^\w-]+", "-", Path(script).stem)
        name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}.log"
        self.name, self.size = f"build/logs/{name}", 0
        try:
            folder = build_dir() / "logs"
            folder.mkdir(exist_ok=True)
            logs = sorted(folder.glob("*.log"), key=lambda path: (path.stat().st_mtime, path.name))
            for old in logs[:max(0, len(logs) - KEPT_LOGS + 1)]:
                old.unlink(missing_ok=True)
            self.file = open(folder / name, "wb", buffering=0)
        except OSError as error:
            self.name, self.file = f"no log: {error.strerror}", open(os.devnull, "wb", buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, text):
        if self.size < MAX_LOG_BYTES:
            data = text.encode("utf-8", "replace")
            self.size += len(data)
            if self.size >= MAX_LOG_BYTES:
                data += b"\n(the log ends here: it grew too large)\n"
            with contextlib.suppress(OSError):  # a full disk is no reason to stop the command
                self.file.write(data)


# ------------------------------------------------------------------------------------------------ finding the culprit

HEAD = re.compile(r"(.*?)Traceback \(most recent call last\):$")
PREFIX = re.compile(r"(\[(?:rank ?|default)(\d+)\]:? ?)")
LAST_LINE = re.compile(r"[^\W\d][\w.]*(: |:?$)")
# Errors that a failure elsewhere brings about, or that only report one.
SECONDARY = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|ChildFailedError"
    r"|ProcessRaisedException|ProcessExitedException|SignalException|remote process exited|ncclRemoteError"
    r"|Timed out waiting|KeyboardInterrupt"
)


class _Traceback:
    def __init__(self, rank, source):
        self.rank, self.lines, self.indent = rank, [], None
        self.source = source  # (command, how often torchrun had reported failed workers before): one attempt
        self.final = ""  # the line that names the error, once it has come
        self.chained = False  # whether another traceback of the same error follows
        self.end = 0  # the number of its last line in the output


class _Findings:
    """Finds, in output as it streams, the traceback of the process that failed first."""

    def __init__(self):
        self.tracebacks, self.open, self.count = [], {}, 0
        self.attempts = {}  # by command
        self.usage = {}  # by command: the line in which it refused
        self.spawned = self.root_rank = self.root_status = None
        self.at_root = False
        self.last_lines = {}  # by command

    def take(self, command, line):
        self.count += 1
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if line.strip():
            self.last_lines[command] = line.strip()
        self._read_summaries(command, line)
        prefix = PREFIX.match(line)
        key = (command, prefix and prefix[1])
        text = line[prefix.end():] if prefix else line
        head = HEAD.match(text)
        current = self.open.get(key)
        if head and head[1].strip().startswith("traceback"):  # torchrun's summary of what was shown already
            self.open.pop(key, None)
        elif head and len(self.tracebacks) < 100:
            if current is None or not current.final or not current.chained:
                rank = prefix[2] if prefix else self.spawned
                current = _Traceback(rank, (command, self.attempts.get(command, 0)))
                self.tracebacks.append(current)
                self.open[key], self.spawned = current, None
            current.lines.append("Traceback (most recent call last):")
            current.indent, current.final, current.chained, current.end = None, "", False, self.count
        elif current is not None and len(current.lines) < 1000:
            self._continue(current, key, text)

    def _continue(self, current, key, text):
        if current.indent is None:
            current.indent = max(0, len(text) - len(text.lstrip()) - 2)
        text = text[current.indent:] if not text[:current.indent].strip() else text.lstrip()
        if not current.final:
            if text.startswith(" "):
                current.lines.append(text)
            elif LAST_LINE.match(text):
                current.lines.append(text)
                current.final = text
        elif text.startswith((" ", "\t")):  # the message goes on
            current.lines.append(text)
        elif text.startswith(("During handling of the above", "The above exception was the direct")):
            current.lines += ["", text, ""]
            current.chained = True
        elif text:
            del self.open[key]
            return
        current.end = self.count

    def _read_summaries(self, command, line):
        if match := re.match(r"-- Process (\d+) terminated with the following error", line):
            self.spawned = match[1]
        elif match := re.match(r"(?:\[[^]]*\]:? ?)?(?:\S+: error: .+|\d\d_\w+\.py: .+)", line):
            self.usage.setdefault(command, line)
        elif "failed (exitcode: " in line:  # torchrun goes on where it may restart them: the last attempt counts
            self.attempts[command] = self.attempts.get(command, 0) + 1
        elif line.startswith("Root Cause (first observed failure)"):
            self.at_root = True
        elif self.at_root and (match := re.match(r"\s+rank\s*: (\d+)", line)):
            self.root_rank = match[1]
        elif self.at_root and (match := re.match(r"\s+exitcode\s*: (-?\d+)", line)):
            self.root_status, self.at_root = int(match[1]), False

    def first(self):
        """The last attempt's first traceback that is no mere consequence of another process's failure, or None."""
        own = [each for each in self.tracebacks if each.final and not SECONDARY.search(each.final)]
        last = dict(each.source for each in own)
        return next((each for each in own if last[each.source[0]] == each.source[1]), None)

    def lines_since(self, traceback):
        return self.count - traceback.end

    def reason(self, command):
        if self.usage:  # its own refusal, else another command's, which it suffers from
            return self.usage.get(command) or next(iter(self.usage.values()))
        found = self.first()
        if found:
            rank = f" (rank {found.rank})" if found.rank is not None else ""
            return _short(found.final) + rank
        if self.root_status is not None:
            return f"rank {self.root_rank}: {_how_it_ended(self.root_status)}"
        finals = [each.final for each in self.tracebacks if each.final]
        return _short(finals[0] if finals else self.last_lines.get(command, ""))


def _short(text):
    return re.sub(r"^(?:\w+\.)+(?=[A-Z])", "", text)[:200]
