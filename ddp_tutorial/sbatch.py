"""The classic mistakes in batch files for Slurm: ``python -m ddp_tutorial.sbatch FILE...``.

problems() knows them, read() tells which options Slurm finds in a file. Both see the text alone and need no Slurm.
tests/test_sbatch.py compares what they say with what a real one does.
"""

import difflib
import re
import shlex
import sys
from collections import namedtuple
from pathlib import Path

# Of sbatch, Slurm 22.05 to 25.05. First those that come without a value, or may do so after an equals sign.
FLAGS = """
    contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe parsable
    propagate quiet reboot requeue resv-ports spread-job stepmgr test-only usage use-min-nodes verbose version wait
""".split()
WITH_VALUE = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output partition power prefer priority
    profile qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid wait-all-nodes wckey wrap
""".split()
SHORT = dict(pair.split("=") for pair in """
    A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error F=nodefile
    G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters m=distribution N=nodes n=ntasks O=overcommit
    o=output p=partition q=qos Q=quiet S=core-spec s=oversubscribe t=time v=verbose V=version W=wait w=nodelist
    x=exclude
""".split())
KEYWORDS = ["if", "then", "else", "do", "while", "!", "{", "(", "exec", "time"]
CONTRADICTING = [{"requeue", "no-requeue"}, {"mem", "mem-per-cpu"}, {"mem", "mem-per-gpu"},
                 {"mem-per-cpu", "mem-per-gpu"}, {"exclusive", "oversubscribe"}]

Option = namedtuple("Option", "line name value")  # value: a text, or True where there is none
Command = namedtuple("Command", "line words expanded")  # expanded: the text in which the shell fills in variables


def read(text):
    """The options that Slurm finds in a batch file: {"nodes": "2", "requeue": True, ...}, by their long names.

    Where one is given twice, the last counts.
    """
    options, _, _ = _header(text)
    return {option.name: option.value for option in options}


def problems(text, folder=None):
    """What is wrong with a batch file: a list of lines, each with its line number, what it is, and what to do.

    folder: where the job will be submitted; with it, the folders of its output must exist.
    """
    options, commands_from, found = _header(text)
    given = {option.name: option.value for option in options}
    found += _shape(text) + _misspelt(text, commands_from) + _values(options, folder) + _tasks(options)
    for command in _commands(text, commands_from):
        found += _launch(command, given, text) + _too_early(command) + _port(command, given)
    return [f"line {line}: {what}" for line, what in sorted(set(found))]


# ----------------------------------------------------------------------------------------------------- the header


def _header(text):
    """Options, the number of the line with the first command, and problems as (line, text)."""
    options, found = [], []
    number = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            more, wrong = _parse(number, line.removeprefix("#SBATCH"))
            options += more
            found += wrong
        elif line.strip() and not line.lstrip().startswith("#"):
            return options, number, found
    return options, number + 1, found


def _parse(number, rest):
    """Options of one directive, as Slurm reads them, and problems."""
    options, found = [], []
    words, cut_short = _words(rest)
    if words is None:
        return [], [(number, "a quote is not closed: close it")]
    if cut_short:
        found.append((number, f"Slurm reads {cut_short} only up to the #: put it in quotes"))
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name in ("-", "--"):
            found.append((number, f'"{word}" is no option: {_remedy_for_stray(word, options)}'))
            return options, found
        if name.startswith("--"):
            name = name[2:]
        else:
            short, value = word[1], word[2:]
            name, equals = SHORT.get(short, short), value
            if value.startswith("="):
                found.append((number, f"Slurm takes the = for a part of the value: write -{short}{value[1:]}"))
                value = value[1:]
        if name in FLAGS:
            options.append(Option(number, name, value if equals else True))
        elif name in WITH_VALUE:
            if not equals and words and words[0].startswith("="):
                equals, value = "=", words.pop(0)[1:] or (words.pop(0) if words else "VALUE")
                found.append((number, f"a space before the =: write --{name}={value}"))
            elif equals and not value:
                follows = words[0] if words and not words[0].startswith("-") else "VALUE"
                found.append((number, f"a space after the =, or no value: write --{name}={follows}"))
                equals = ""
            if not equals:
                if not words or words[0].startswith("-"):
                    if not found:
                        found.append((number, f"--{name} has no value: write --{name}=VALUE"))
                    continue
                value = words.pop(0)
            options.append(Option(number, name, value))
        else:
            close = difflib.get_close_matches(name, [*FLAGS, *WITH_VALUE], 1)
            found.append((number, f"sbatch knows no {word.partition('=')[0]}: "
                          + (f"write --{close[0]}" if close else "sbatch --help lists what it knows")))
    return options, found


def _remedy_for_stray(word, options):
    if word.startswith("=") and options:
        return f"write --{options[-1].name}{word}, without spaces"
    name = word.partition("=")[0]
    return f"write --{word}" if name in [*FLAGS, *WITH_VALUE] else "put quotes around a value that has spaces"


def _words(rest):
    """The words of a directive, up to a comment, and the word that this cuts short; None where a quote is open."""
    words, word, quote, cut_short = [], None, "", ""
    for character in rest:
        if quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "'\"":
            quote, word = character, word or ""
        elif character == "#":
            cut_short = word or ""
            break
        elif character.isspace():
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + character
    if quote:
        return None, ""
    return words + ([word] if word is not None else []), cut_short


def _shape(text):
    first = text.split("\n", 1)[0]
    found = []
    if not first.startswith("#!"):
        found.append((1, "the first line must name the shell, and Slurm refuses this: write #!/bin/bash there"))
    carriage_returns = [number for number, line in enumerate(text.split("\n"), 1) if line.endswith("\r")]
    if carriage_returns:
        found.append((carriage_returns[0],
                      "the line ends as on Windows, and Slurm refuses this: run sed -i 's/\\r$//' on the file"))
    return found


def _misspelt(text, commands_from):
    """Directives that Slurm takes for comments."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"(\s*#\s*sbatch)(\s+-.*)", line, re.IGNORECASE)
        if line.startswith("#SBATCH"):
            if number > commands_from:
                found.append((number, f"Slurm looks for options only above the first command, in line {commands_from}:"
                              " move this up"))
        elif match:
            options, wrong = _parse(number, match[2])
            if options and not wrong:  # a command that somebody may copy has words that are no options
                found.append((number, f'for Slurm "{match[1].strip()}" begins a comment: write #SBATCH'
                              + ", at the line's beginning" * line[0].isspace()))
    return found


def _values(options, folder):
    found, before = [], []
    for line, name, value in options:
        text = "" if value is True else value
        if "$" in text or "`" in text or text.startswith("~"):
            instead = "%j is the job's number, %x its name" if name in ("output", "error") else "write it out"
            found.append((line, f"nobody fills in variables or ~ here, so {text} stays as it is: {instead}"))
        elif name in ("output", "error", "input"):
            where = str(Path(text).parent)
            if re.search("%[^%]", where):
                found.append((line, f"Slurm makes no folders, and nobody can have made {where} before the job has its"
                              " number: put the % into the file's name"))
            elif folder is not None and not (Path(folder) / where).is_dir():
                found.append((line, f"Slurm makes no folders, and there is no {where}: make it before you submit"))
        for other in before:
            if other.value != value if other.name == name else {name, other.name} in CONTRADICTING:
                found.append((line, f"--{name} contradicts --{other.name} in line {other.line}: delete one of them"))
        before.append(Option(line, name, value))
    return found


# ------------------------------------------------------------------------------------------------- tasks and GPUs


def _number(text):
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _tasks(options):
    lines = {option.name: option.line for option in options}
    given = {option.name: option.value for option in options}
    nodes, tasks, each = (_number(given.get(name)) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if not nodes or not tasks:
        return []
    if each and tasks > nodes * each:
        return [(lines["ntasks"], f"{tasks} tasks are more than {nodes} nodes with {each} each:"
                 f" write --ntasks={nodes * each}, or leave it out")]
    if tasks % nodes:
        return [(lines["ntasks"], f"{tasks} tasks do not divide over {nodes} nodes, so some have more than others:"
                 " leave it out, and write --ntasks-per-node")]
    return []


def _tasks_per_node(given):
    """How many tasks srun starts on each node; None where that cannot be said."""
    if "ntasks-per-node" in given:
        return _number(given["ntasks-per-node"])
    if "ntasks" not in given:
        return None if {"gpus-per-task", "ntasks-per-gpu"} & given.keys() else 1
    nodes, tasks = _number(given.get("nodes", "1")), _number(given["ntasks"])
    return tasks // nodes if nodes and tasks and tasks % nodes == 0 else None


def _gpus_per_node(given):
    if "gpus-per-node" in given:
        return _number(str(given["gpus-per-node"]).split(":")[-1])
    match = re.search(r"\bgpu(?::[A-Za-z]\w*)?(?::(\d+))?", str(given.get("gres", "")))
    return int(match[1] or 1) if match else None


def _option_of(words, name):
    """The value of an option of a command, in each of the forms that people write."""
    dashed, underscored = f"--{name}", f"--{name.replace('-', '_')}"
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key in (dashed, underscored):
            return value if equals else "".join(words[number + 1 : number + 2])
    return None


# ------------------------------------------------------------------------------------------------- the commands


def _commands(text, commands_from):
    """What the shell will run: a Command for each, with the number of its first line."""
    lines = text.replace("\r", "").split("\n")
    body = "\n".join(lines[commands_from - 1 :])
    # A here-document is not run, but keeps its lines for the count.
    body = re.sub(r"<<-?\s*(['\"]?)(\w+)\1(.*\n)(?:.*\n)*?\s*\2(?=\n|$)",
                  lambda match: match[3] + "\n" * (match[0].count("\n") - match[3].count("\n")), body)
    line = start = commands_from
    raw, expanded, quote, position = "", "", "", 0
    while position <= len(body):
        character = body[position : position + 1] or "\n"
        ends = not quote and character in "\n;&|"
        if ends and not (character == "&" and raw.endswith(">")):
            if raw.strip():
                yield Command(start, _split(raw), expanded)
            raw = expanded = ""
            start = line + (character == "\n")
        elif not quote and character == "#" and (not raw or raw[-1].isspace()):
            position = (body + "\n").index("\n", position)
            continue
        elif character == "\\" and quote != "'":
            following = body[position + 1 : position + 2]
            line += following == "\n"
            raw += " " if following == "\n" else character + following
            position += 2
            continue
        else:
            if character == quote:
                quote = ""
            elif not quote and character in "'\"":
                quote = character
            raw += character
            expanded += character if quote != "'" else ""
        line += character == "\n"
        position += 1


def _split(raw):
    """The words of a command; of `bash -c '...'` also those in quotes."""
    try:
        words = shlex.split(raw)
    except ValueError:
        words = raw.split()
    words = [word for word in words if word not in KEYWORDS]
    # X=1 torchrun, env X=1 torchrun, nice torchrun
    while len(words) > 1 and (re.fullmatch(r"\w+=.*", words[0], re.DOTALL) or words[0] in ("env", "nice", "numactl")):
        words.pop(0)
    for number, word in enumerate(words[1:], 1):
        if words[number - 1] in ("-c", "-lc", "-ec") and Path(words[number - 2]).name in ("bash", "sh"):
            words = words[:number] + word.split() + words[number + 1 :]
            break
    return words


def _is_torchrun(words):
    return any(Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch")
               for word in words)


def _launch(command, given, text):
    """What a command starts, against what the header asked for."""
    line, words, _ = command
    if not words or words[0] in ("echo", "export", "trap", "command", "which"):
        return []
    by_srun = Path(words[0]).name == "srun"
    torchrun = _is_torchrun(words)
    python = any(re.fullmatch(r"python[\d.]*", Path(word).name) for word in words)
    if not torchrun and not (by_srun and python):
        return []
    found = []
    gpus, tasks = _gpus_per_node(given), _tasks_per_node(given)
    if torchrun:
        processes = _option_of(words, "nproc-per-node") or "1"
        if gpus and _number(processes) not in (None, gpus):
            found.append((line, f"torchrun starts {processes} a node, which has {gpus} GPUs: write"
                          f" --nproc-per-node={gpus}"))
        nodes = _number(given.get("nodes")) or 1
        first = re.fullmatch(r"torchrun|python[\d.]*", Path(words[0]).name)
        if first and max(nodes, _number(_option_of(words, "nnodes")) or 1) > 1:
            found.append((line, "this runs on the first node only, and torchrun waits there for the others: write"
                          " srun before it"))
    if not by_srun:
        return found
    own, _ = _parse(line, " " + shlex.join(_srun_options(words)))
    own = {option.name: option.value for option in own}
    if "ntasks-per-node" in own:
        tasks = _number(own["ntasks-per-node"])
    elif "ntasks" in own:
        tasks = None  # for this step alone, and on purpose
    if torchrun and tasks and tasks > 1:
        found.append((line, f"srun starts {tasks} torchruns a node, and each of them all ranks: write"
                      " #SBATCH --ntasks-per-node=1"))
    if not torchrun and gpus and tasks and tasks != gpus:
        found.append((line, f"srun starts {tasks} {'process' if tasks == 1 else 'processes'} a node, which has {gpus}"
                      f" GPUs: write #SBATCH --ntasks-per-node={gpus}"))
    if "cpus-per-task" in given and "cpus-per-task" not in own and "SRUN_CPUS_PER_TASK" not in text:
        found.append((line, "since Slurm 22.05 srun does not take --cpus-per-task from the header, and may keep each"
                      ' task on one CPU: write srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    return found


def _srun_options(words):
    """Those of srun's words that stand before the program, as words without spaces."""
    own = []
    for word in words[1:]:
        takes_this = own and own[-1].startswith("-") and "=" not in own[-1] and _takes_value(own[-1])
        if not word.startswith("-") and not takes_this:
            break
        own.append(word)
    return own


def _takes_value(word):
    if word.startswith("--"):
        return word[2:] in WITH_VALUE
    return len(word) == 2 and SHORT.get(word[1]) in WITH_VALUE


def _too_early(command):
    match = re.search(r"(?<!\\)\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b", command.expanded)
    if not match:
        return []
    return [(command.line, f"the batch shell fills in ${match[1]}, and there, on the first node, it is 0 for all:"
             f" write srun bash -c '... ${match[1]} ...', in single quotes")]


def _port(command, given):
    fixed = [
        re.search(r"\bMASTER_PORT=(\d+)", command.expanded),
        re.fullmatch(r"(\d+)", _option_of(command.words, "master-port") or ""),
        re.search(r":(\d+)$", _option_of(command.words, "rdzv-endpoint") or ""),
    ]
    if "exclusive" in given:
        return []
    return [(command.line, f"another job on the same node may use port {match[1]}: make one from the job's number,"
             " $((20000 + SLURM_JOB_ID % 10000))") for match in fixed if match]


def main(files):
    """Check batch files, and print what is wrong with them. Returns the exit status."""
    if not files or str(files[0]).startswith("-"):
        print("sbatch: name the files to check: python -m ddp_tutorial.sbatch FILE...", file=sys.stderr)
        return 2
    status = 0
    for file in files:
        try:
            text = Path(file).read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            print(f"sbatch: cannot read {file} ({reason}): name a batch file", file=sys.stderr)
            return 2
        found = problems(text, folder=".")
        for problem in found:
            print(f"{file}, {problem}")
        if not found:
            print(f"{file}: no classic mistake")
        status = status or int(bool(found))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
