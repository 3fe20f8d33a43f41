"""A laboratory of several machines on one: ``python -m ddp_tutorial.lab up --machines 2``.

Each machine is a Linux network namespace with its own network card, address and host name (node0, node1, ...). They
are plugged into a switch, a bridge in a namespace of its own, so this computer's interfaces, routes and firewall have
no part in it. Files and processes are shared with this computer, as on a cluster with a shared file system. It needs
root, and the commands `ip` and `tc` of iproute2. Where that cannot be had, ``up --or-loopback`` makes do with
processes on 127.0.0.1: enough to start several launchers side by side. To cut off such a machine is to freeze it.

    python -m ddp_tutorial.lab up --machines 2 --bandwidth 100
    python -m ddp_tutorial.lab exec 0 -- getent hosts node1
    python -m ddp_tutorial.lab cut 1
    python -m ddp_tutorial.lab heal 1
    python -m ddp_tutorial.lab status
    python -m ddp_tutorial.lab down
"""

import argparse
import contextlib
import ctypes
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

from ddp_tutorial.paths import build_dir, project_root
from ddp_tutorial.supervisor import live_processes

RUN, ETC_NETNS, NETNS = Path("/run"), Path("/etc/netns"), Path("/var/run/netns")  # the last two are iproute2's
LINUX = sys.platform.startswith("linux")
MOST_MACHINES = 16
GRACE = 3.0  # seconds that processes have to end after SIGTERM
SETTLE = 10.0  # seconds for a plugged-in card to be part of the network, or for killed processes to be gone
NAMESPACES, LOOPBACK = "network namespaces", "loopback"
MARK = "DDP_TUTORIAL_LAB_MACHINE"  # in the environment of what `exec` starts on loopback
NEW_UTS = 0x04000000  # CLONE_NEWUTS of <sched.h>; os.unshare came with Python 3.12
# Names and addresses of this computer's network, which mean something else on a machine. Give it its own after the --:
# exec 0 -- env GLOO_SOCKET_IFNAME=eth0 COMMAND.
THIS_COMPUTERS = ("PET_LOCAL_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RENDEZVOUS = ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")  # variables that name a machine
TOOLS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian keeps ip and tc
BRIDGE = "switch"
LIMITS = {"bandwidth": 100_000, "latency": 60_000, "loss": 100}


class LabError(Exception):
    """Something that cannot be done; its text is one line that says what to do."""


class NoNamespaces(LabError):
    """This computer makes no machines; its text says why."""


class ToolFailed(LabError):
    """A command of iproute2 failed; its text is the command and what it said."""


# ------------------------------------------------------------------------------------------------ for the notebook


def up(machines=2, bandwidth=None, latency=None, loss=None, own_name=None, second_network=False, or_loopback=False,
       name=None, say=print):
    """Make the machines, in place of those of an earlier lab of this name, and return state().

    Args:
        machines: how many, 1 to 16.
        bandwidth: Mbit/s that each can send, and that each can receive.
        latency: milliseconds by which each packet that a machine sends is delayed.
        loss: percentage of the packets that a machine sends which are lost.
        own_name: what its own host name means on each machine: an IPv4 address, or "second" for its address on the
            second network. By default its address; Debian writes 127.0.1.1 into /etc/hosts.
        second_network: give each a second card, mgmt0, with an address, but connected to nothing.
        or_loopback: where there are no namespaces, use processes on 127.0.0.1 and say why.
        name: of the lab; by default one made from the project's folder.
        say: called with each line that tells what was made.

    Raises LabError, with nothing left behind, where that cannot be done.
    """
    name = name or default_name()
    options = {"bandwidth": bandwidth, "latency": latency, "loss": loss, "own_name": own_name,
               "second_network": second_network}
    _check(name, machines, options)
    try:
        lab = _up_with_namespaces(name, machines, options, say)
    except NoNamespaces as reason:
        if not or_loopback:
            raise NoNamespaces(f"{reason}, or add --or-loopback to make do with processes on 127.0.0.1") from None
        say(f"no network namespaces: {reason}")
        lab = _up_on_loopback(name, machines, options, say)
    _show(lab, say)
    return lab


def down(name=None, say=print):
    """End what runs on the machines and remove them; where there is no lab, say so."""
    name = name or default_name()
    found = _states(name)
    for lab in found:
        _need_root(lab)
        with _locked(lab["mode"]):
            _remove(lab)
    say(f"lab {name} is down" if found else f"lab {name} is not up: nothing to do")


def state(name=None):
    """What is known of the lab, or None where none is up.

    A dictionary: "mode" ("network namespaces" or "loopback"), "name", "machines" (how many), "addresses", and for
    namespaces the options given to up().
    """
    ready = [lab for lab in _states(name or default_name()) if lab["ready"] and all(map(_exists, _namespaces(lab)))]
    return ready[0] if ready else None


def address(number, name=None):
    """The address of machine `number`."""
    return _state_with(number, name)["addresses"][number]


def exec_command(number, words, name=None):
    """The words of a command that runs `words`, a program and its arguments, on machine `number`."""
    name = name or default_name()
    return [sys.executable, "-m", "ddp_tutorial.lab", "exec", "--name", name, str(number), "--", *map(str, words)]


def cut(number, name=None, when=None, patience=120.0):
    """Take a machine off the network, once the file `when` exists if one is given; wait `patience` seconds for it."""
    _state_with(number, name)
    if not 0 < patience < 1e6:
        raise LabError(f"--patience {patience:g} is no number of seconds from 1 to 1,000,000")
    end = time.monotonic() + patience
    while when and not Path(when).exists():
        if time.monotonic() > end:
            raise LabError(f"{when} did not appear within {patience:g} s: machine {number} was not cut off")
        time.sleep(0.1)
    lab = _state_with(number, name)
    if lab["mode"] == NAMESPACES:
        _ip("-n", lab["switch"], "link", "set", f"node{number}", "down")
        return
    _save(lab | {"cut": sorted({*lab["cut"], number})})  # first, so that exec starts nothing more
    stopped = set()
    while new := _marked(lab, number) - stopped:  # they may have started others meanwhile
        _signal(new, signal.SIGSTOP)
        stopped |= new


def heal(number, name=None):
    """Bring a machine back that was cut off."""
    lab = _state_with(number, name)
    if lab["mode"] == NAMESPACES:
        _ip("-n", lab["switch"], "link", "set", f"node{number}", "up")
        _wait_for_network(lab, [number])
        return
    _signal(_marked(lab, number), signal.SIGCONT)
    _save(lab | {"cut": [other for other in lab["cut"] if other != number]})


def default_name():
    """The lab of this copy of the series, so that two copies do not get into each other's way."""
    return f"{zlib.crc32(str(project_root()).encode()):08x}"


def why_no_namespaces():
    """Why no machines can be made here, and what to do about it; empty where nothing speaks against trying."""
    if not LINUX:
        return "network namespaces exist on Linux only: use Linux"
    if os.geteuid() != 0:
        return "making machines needs root: put sudo before the command"
    if not shutil.which("ip", path=TOOLS):
        return "the command ip is missing: install iproute2"
    return ""


# --------------------------------------------------------------------------------------------------------- making


def _check(name, machines, options):
    if not re.fullmatch(r"[A-Za-z0-9]{1,30}", name):
        raise LabError(f'"{name}" cannot name a lab: use up to 30 letters and digits')
    if not 1 <= machines <= MOST_MACHINES:
        raise LabError(f"{machines} machines cannot be made: choose 1 to {MOST_MACHINES}")
    for key, largest in LIMITS.items():
        if options[key] is not None and not 0 < options[key] <= largest:
            raise LabError(f"--{key} {options[key]:g} cannot be had: choose a number above 0, and up to {largest}")
    own_name = options["own_name"]
    if own_name == "second" and not options["second_network"]:
        raise LabError("--own-name second needs --second-network: add it")
    if own_name not in (None, "second"):
        try:
            ipaddress.IPv4Address(own_name)
        except ValueError:
            raise LabError(f'"{own_name}" is no IPv4 address: write one such as 127.0.1.1, or second') from None


def _up_on_loopback(name, machines, options, say):
    _clear_for_up(name, say)
    lab = {"name": name, "mode": LOOPBACK, "machines": machines, "ready": True, "cut": [],
           "addresses": ["127.0.0.1"] * machines}
    _save(lab)
    if ignored := ", ".join(f"--{key.replace('_', '-')}" for key, value in options.items() if value):
        say(f"on loopback without effect: {ignored}")
    return lab


def _up_with_namespaces(name, machines, options, say):
    if reason := why_no_namespaces():
        raise NoNamespaces(reason)
    try:
        with _locked(NAMESPACES):
            _clear_for_up(name, say)
            return _make_namespaces(name, machines, options)
    except ToolFailed as error:
        raise NoNamespaces(f"this computer makes no machines ({error}): use one where you may do that "
                           "(a container must be privileged)") from None
    except OSError as error:
        raise NoNamespaces(f"{error.filename} cannot be written ({error.strerror}): allow that") from None


def _make_namespaces(name, machines, options):
    """Returns the state. What it makes is written down first, so that a crash leaves nothing that nobody knows of."""
    network = _unused_network()
    lab = {
        "name": name, "mode": NAMESPACES, "machines": machines, "ready": False, **options,
        "network": network,
        "addresses": [f"10.77.{network}.{number + 1}" for number in range(machines)],
        "namespaces": [f"ddp-{name}-{number}" for number in range(machines)],
        "switch": f"ddp-{name}-switch",
    }
    if foreign := [each for each in _namespaces(lab) if _exists(each) or (ETC_NETNS / each).exists()]:
        raise LabError(f"there is a network namespace {foreign[0]} already, which is no lab's: choose another --name")
    _save(lab)
    try:
        _build(lab)
        lab["ready"] = True
        _save(lab)
    except BaseException:
        _remove(lab)
        raise
    return lab


def _build(lab):
    switch, addresses = lab["switch"], lab["addresses"]
    _add_namespace(switch)
    _ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
    _ip("-n", switch, "link", "set", BRIDGE, "up")
    for number, (namespace, own) in enumerate(zip(lab["namespaces"], addresses)):
        _write_names(lab, number)
        _add_namespace(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", f"node{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", switch, "link", "set", f"node{number}", "master", BRIDGE, "up")
        _ip("-n", namespace, "address", "add", f"{own}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        if lab["second_network"]:
            # A cable needs two ends: with both in this machine it leads nowhere.
            _ip("-n", namespace, "link", "add", "mgmt0", "type", "veth", "peer", "name", "mgmt0-end")
            _ip("-n", namespace, "address", "add", f"{_second_address(lab, number)}/24", "dev", "mgmt0")
            _ip("-n", namespace, "link", "set", "mgmt0-end", "up")
            _ip("-n", namespace, "link", "set", "mgmt0", "up")
        _limit(lab, number)
    _wait_for_network(lab, range(lab["machines"]))


def _add_namespace(namespace):
    """With IPv6 switched off, so that nothing waits for it; running a command there shows that `exec` will work."""
    _ip("netns", "add", namespace)
    switch_off = "for each in all default; do file=/proc/sys/net/ipv6/conf/$each/disable_ipv6; "
    switch_off += "if test -w $file; then echo 1 > $file; fi; done"
    _ip("netns", "exec", namespace, "sh", "-c", switch_off)


def _write_names(lab, number):
    """What `ip netns exec` lays over the files of the same names in /etc."""
    own = lab["own_name"] or lab["addresses"][number]
    if own == "second":
        own = _second_address(lab, number)
    hosts = ["127.0.0.1 localhost"]
    for other, there in enumerate(lab["addresses"]):
        hosts.append(f"{own if other == number else there} node{other}")
    folder = ETC_NETNS / lab["namespaces"][number]
    folder.mkdir(parents=True)
    files = {"hosts": hosts, "resolv.conf": ["options timeout:1 attempts:1"], "nsswitch.conf": _name_services()}
    for file, lines in files.items():
        if Path("/etc", file).exists():
            (folder / file).write_text("".join(f"{line}\n" for line in lines))


def _name_services():
    """This computer's nsswitch.conf, but host names come from the file alone: nobody there would answer a query."""
    with contextlib.suppress(OSError):
        lines = Path("/etc/nsswitch.conf").read_text().splitlines()
        return [line for line in lines if not line.startswith("hosts:")] + ["hosts: files"]
    return []


def _limit(lab, number):
    """Let the machine's card, and the switch's end of its cable, be slow or bad."""
    namespace, switch = lab["namespaces"][number], lab["switch"]
    bandwidth, latency, loss = lab["bandwidth"], lab["latency"], lab["loss"]
    if bandwidth:
        burst = int(max(125 * bandwidth, 5e3))  # what comes in 1 ms, or three packets
        bucket = ["tbf", "rate", f"{bandwidth:f}mbit", "burst", f"{burst}b", "latency", "100ms"]
        _tc(switch, f"node{number}", bucket, "--bandwidth")
    if latency or loss:
        line = ["netem", "limit", "10000", "delay", f"{latency or 0:f}ms", "loss", f"{loss or 0:f}%"]
        _tc(namespace, "eth0", line + (["rate", f"{bandwidth:f}mbit"] if bandwidth else []), "--latency and --loss")
    elif bandwidth:
        _tc(namespace, "eth0", bucket, "--bandwidth")


def _tc(namespace, interface, words, options):
    try:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *words)
    except ToolFailed as error:
        if "kind is unknown" in str(error) or "No such file" in str(error):
            missing = f"this kernel has no {words[0]} (module sch_{words[0]}), which {options} need"
            raise LabError(f"{missing}: leave that out, or use another kernel") from None
        raise LabError(f"{error}: leave {options} out") from None


def _wait_for_network(lab, numbers):
    """The switch forwards nothing for the first moments, up to a second, after a cable is plugged in."""
    wanted, end = {f"node{number}" for number in numbers}, time.monotonic() + SETTLE
    while True:
        links = json.loads(_ip("-j", "-d", "-n", lab["switch"], "link", "show", "master", BRIDGE))
        forwarding = {link["ifname"] for link in links
                      if link["linkinfo"].get("info_slave_data", {}).get("state") == "forwarding"}
        if wanted <= forwarding:
            return
        if time.monotonic() > end:
            missing = ", ".join(sorted(wanted - forwarding))
            raise LabError(f"{missing} got no connection within {SETTLE:g} s: try again")
        time.sleep(0.02)


def _unused_network():
    """The first K for which nothing here uses 10.77.K.0/24.

    A route to all of 10.77.0.0/16, as companies have, does not count: no machine of the lab can see it.
    """
    lab_networks = ipaddress.ip_network("10.77.0.0/16")
    words = [route.get("dst", "") for route in json.loads(_ip("-j", "-4", "route", "show", "table", "all") or "[]")]
    for interface in json.loads(_ip("-j", "-4", "address") or "[]"):
        words += [each["local"] for each in interface.get("addr_info", [])]
    used = set()
    for word in words:
        with contextlib.suppress(ValueError):  # "default"
            seen = ipaddress.ip_network(word)
            if seen != lab_networks and seen.subnet_of(lab_networks):
                first, last = (int(str(end).split(".")[2]) for end in (seen[0], seen[-1]))
                used |= set(range(first, last + 1))
    for file in RUN.glob("ddp-lab-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            used.add(json.loads(file.read_text())["network"])
    free = sorted(set(range(256)) - used)
    if not free:
        raise LabError("all of 10.77.0.0/16 is in use: take down the labs that you no longer need")
    return free[0]


def _second_address(lab, number):
    return f"10.78.{lab['network']}.{number + 1}"


# ------------------------------------------------------------------------------------------------------- removing


def _clear_for_up(name, say):
    for lab in _states(name):
        _need_root(lab)
        if not lab["ready"]:
            say(f"removing what an interrupted up or down of lab {name} left")
        elif running := _processes(lab):
            raise LabError(f"processes still run on the machines of lab {name} "
                           f"({', '.join(map(str, sorted(running)))}): end them with down first")
        else:
            say(f"replacing lab {name}")
        _remove(lab)


def _remove(lab):
    """End what runs in the lab and remove all that it made, whatever of it there is, and then what is known of it."""
    with contextlib.suppress(OSError):  # the disk may be full
        _save(lab | {"ready": False})
    _end_processes(lab)
    for namespace in _namespaces(lab):
        if _exists(namespace):
            _ip("netns", "delete", namespace)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(ETC_NETNS / namespace)
    if lab["mode"] == NAMESPACES:
        with contextlib.suppress(OSError):  # it holds others'
            ETC_NETNS.rmdir()
    for file in (_file(lab), _file(lab).with_suffix(".tmp")):
        file.unlink(missing_ok=True)
    if lab["mode"] == LOOPBACK:
        with contextlib.suppress(OSError):  # it holds others'
            _file(lab).parent.rmdir()


def _end_processes(lab):
    end = time.monotonic() + GRACE
    asked = set()
    while (running := _processes(lab)) and time.monotonic() < end:
        _signal(running - asked, signal.SIGTERM)
        _signal(running - asked, signal.SIGCONT)  # a frozen one ends only when it thaws
        asked |= running
        time.sleep(0.02)
    end = time.monotonic() + SETTLE
    while running := _processes(lab):
        if time.monotonic() > end:
            raise LabError(f"process {min(running)} of lab {lab['name']} cannot be ended: see what it is, "
                           "then run down again")
        _signal(running, signal.SIGKILL)
        time.sleep(0.02)


def _processes(lab):
    """The ids of those that run on the lab's machines."""
    if lab["mode"] == LOOPBACK:
        return set().union(*(_marked(lab, number) for number in range(lab["machines"])))
    there = [namespace for namespace in _namespaces(lab) if _exists(namespace)]
    pids = {int(pid) for namespace in there for pid in _ip("netns", "pids", namespace).split()}
    return pids - {os.getpid()}


def _signal(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _namespaces(lab):
    return [*lab["namespaces"], lab["switch"]] if lab["mode"] == NAMESPACES else []


def _exists(namespace):
    return (NETNS / namespace).exists()


# ----------------------------------------------------------------------------------------- processes as machines


def _mark(lab, number):
    return f"{MARK}={lab['name']}/{number}"


def _marked(lab, number):
    """The ids of the processes that `exec` started on this machine, and of their descendants."""
    parents, found = {}, set()
    for pid, parent, marked in live_processes(_mark(lab, number)):
        parents[pid] = parent
        if marked:
            found.add(pid)
    for pid in parents:
        line = [pid]
        while line[-1] in parents and line[-1] not in found and parents[line[-1]] not in line:
            line.append(parents[line[-1]])
        if line[-1] in found:
            found.update(line)
    return found - {os.getpid()}


# ------------------------------------------------------------------------------------------------- what is known


def _file(lab):
    """Namespaces end with this computer's next start, and so does what /run says of them."""
    if lab["mode"] == NAMESPACES:
        return RUN / f"ddp-lab-{lab['name']}.json"
    return project_root() / "build" / "lab" / f"{lab['name']}.json"


def _states(name):
    """What is known of labs of this name: one, or none, or two where one mode was left for the other."""
    found = []
    for mode in (NAMESPACES, LOOPBACK):
        with contextlib.suppress(FileNotFoundError):
            found.append(json.loads(_file({"name": name, "mode": mode}).read_text()))
    return found


def _state_with(number, name):
    name = name or default_name()
    lab = state(name)
    if lab is None:
        raise LabError(f"no lab {name} is up: python -m ddp_tutorial.lab up --machines 2 makes one")
    if not 0 <= number < lab["machines"]:
        raise LabError(f"there is no machine {number}: lab {name} has machines 0 to {lab['machines'] - 1}")
    _need_root(lab)
    return lab


def _need_root(lab):
    if lab["mode"] == NAMESPACES and (reason := why_no_namespaces()):
        raise LabError(f"machines of lab {lab['name']} are network namespaces, and {reason}")


def _save(lab):
    if lab["mode"] == LOOPBACK:
        (build_dir() / "lab").mkdir(exist_ok=True)
    new = _file(lab).with_suffix(".tmp")
    new.write_text(json.dumps(lab, indent=1) + "\n")
    new.replace(_file(lab))


@contextlib.contextmanager
def _locked(mode):
    """One at a time: two labs must not choose the same network."""
    if mode == LOOPBACK:
        yield
        return
    import fcntl  # Windows has none

    with open(RUN / "ddp-lab.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ip(*words):
    return _run("ip", *words)


def _run(program, *words):
    """What the program prints. Raises ToolFailed where it fails."""
    found = shutil.which(program, path=TOOLS)
    if not found:
        raise LabError(f"the command {program} is missing: install iproute2")
    command = f"{program} {' '.join(words)}"
    try:
        done = subprocess.run([found, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{command}: no answer within 60 s") from None
    if done.returncode:
        raise ToolFailed(f"{command}: {' '.join(done.stderr.split()) or f'exit status {done.returncode}'}")
    return done.stdout


# --------------------------------------------------------------------------------------------------- command line


def _show(lab, say):
    rows = [["machine", "host name", "address", "limits"]]
    limits = []
    if lab["mode"] == NAMESPACES:
        limits += [f"{lab['bandwidth']:g} Mbit/s"] if lab["bandwidth"] else []
        limits += [f"{lab['latency']:g} ms"] if lab["latency"] else []
        limits += [f"{lab['loss']:g} % lost"] if lab["loss"] else []
    for number, there in enumerate(lab["addresses"]):
        rows.append([str(number), f"node{number}", there, ", ".join(limits) or "none"])
        if lab["mode"] == NAMESPACES and lab["second_network"]:
            rows[-1][2] += f", {_second_address(lab, number)} (mgmt0, not connected)"
    say(f"lab {lab['name']}: {lab['mode']}")
    _table(rows, say)
    if lab["mode"] == NAMESPACES and lab["own_name"]:
        meaning = {"second": "its address on mgmt0"}.get(lab["own_name"], lab["own_name"])
        say(f"on each machine its own host name means {meaning}")


def _table(rows, say):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())


def status(name=None, say=print):
    """Say how the lab is. Returns the exit status: 0 where one is up, else 1."""
    name = name or default_name()
    lab = state(name)
    if lab is None:
        said = "is half made or half removed: run down" if _states(name) else "is not up"
        say(f"lab {name} {said}")
        return 1
    rows = [["machine", "host name", "address", "link"]]
    for number, there in enumerate(lab["addresses"]):
        rows.append([str(number), f"node{number}", there, "up"])
        if lab["mode"] == LOOPBACK:
            rows[-1][3] = "cut (frozen)" if number in lab["cut"] else "up"
    if lab["mode"] == NAMESPACES:
        _need_root(lab)
        rows[0].append("sends through")
        links = json.loads(_ip("-j", "-n", lab["switch"], "link", "show", "master", BRIDGE))
        connected = {link["ifname"] for link in links if "UP" in link["flags"]}
        for number, row in enumerate(rows[1:]):
            row[3] = "up" if f"node{number}" in connected else "cut"
            qdisc = _run("tc", "-n", lab["namespaces"][number], "qdisc", "show", "dev", "eth0", "root")
            row.append(re.sub(r"qdisc (\w+) \w+: root (refcnt \d+ ?)?", r"\1 ", qdisc).strip())
    say(f"lab {name}: {lab['mode']}")
    _table(rows, say)
    return 0


def execute(number, words, name=None):
    """Become the command `words` on machine `number`: what is sent to this process, or waits for it, means that."""
    lab = _state_with(number, name)
    if lab["mode"] == LOOPBACK:
        if number in lab["cut"]:
            raise LabError(f"machine {number} is frozen: heal it first")
        key, _, value = _mark(lab, number).partition("=")
        os.environ[key] = value
        words = [_on_loopback(word) for word in words]
        for variable in RENDEZVOUS:
            if variable in os.environ:
                os.environ[variable] = _on_loopback(os.environ[variable])
    if not shutil.which(words[0]):
        raise LabError(f"there is no command {words[0]}")
    if lab["mode"] == NAMESPACES:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_UTS):
            raise LabError(f"this computer gives machines no host names ({os.strerror(ctypes.get_errno())})")
        socket.sethostname(f"node{number}")
        for variable in THIS_COMPUTERS:
            os.environ.pop(variable, None)
        words = [shutil.which("ip", path=TOOLS), "netns", "exec", lab["namespaces"][number], *words]
    for ignored in ("SIGPIPE", "SIGXFSZ"):  # by Python, which a command would inherit
        if hasattr(signal, ignored):
            signal.signal(getattr(signal, ignored), signal.SIG_DFL)
    sys.stdout.flush()
    os.execvp(words[0], words)


def _on_loopback(text):
    return re.sub(r"\bnode\d+\b", "127.0.0.1", text)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        _refuse(f"{message} (--help lists the options)")


def _refuse(message):
    print(f"lab: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parser():
    parser = Parser(prog="python -m ddp_tutorial.lab", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, help):
        made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.add_argument("--name", default=default_name(), help="of the lab (made from the project's folder)")
        return made

    add = command("up", "make the machines").add_argument
    add("--machines", type=int, required=True, metavar="N", help=f"1 to {MOST_MACHINES}")
    add("--bandwidth", type=float, metavar="MBIT", help="Mbit/s that each can send, and can receive")
    add("--latency", type=float, metavar="MS", help="milliseconds on the way, for each packet")
    add("--loss", type=float, metavar="PERCENT", help="of the packets that each sends")
    add("--own-name", metavar="ADDRESS",
        help="what each machine's own host name means there (its address), or second")
    add("--second-network", action="store_true", help="a second card, mgmt0, that is connected to nothing")
    add("--or-loopback", action="store_true", help="processes on 127.0.0.1 where there are no network namespaces")
    command("exec", "run a command on machine N: exec N -- COMMAND").add_argument("number", type=int, metavar="N")
    add = command("cut", "take machine N off the network").add_argument
    add("number", type=int, metavar="N")
    add("--when", metavar="FILE", help="wait until FILE exists")
    add("--patience", type=float, default=120.0, metavar="SECONDS", help="wait no longer (120)")
    command("heal", "bring machine N back").add_argument("number", type=int, metavar="N")
    command("status", "say what is there")
    command("down", "end what runs on the machines, and remove them")
    return parser


def main(arguments=None):
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = None
    if "--" in words:
        rest = words[words.index("--") + 1:]
        words = words[: words.index("--")]
    args = _parser().parse_args(words)
    if (args.command == "exec") != bool(rest):
        _refuse("write it as: exec N -- COMMAND" if args.command == "exec" else f"{args.command} takes no command")
    if args.command == "up":  # so that it clears away what it has made
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = {key: value for key, value in vars(args).items() if key != "command"}
    try:
        if args.command == "exec":
            execute(words=rest, **options)
        return {"up": up, "cut": cut, "heal": heal, "status": status, "down": down}[args.command](**options)
    except LabError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    ended = main()
    sys.exit(ended if isinstance(ended, int) else 0)
