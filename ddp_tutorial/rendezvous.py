"""``python -m ddp_tutorial --rendezvous HOST:PORT``: whether machines can train together, before any training.

Every machine looks at the name, the route and the port by itself. Then all meet at HOST:PORT, compare versions and
clocks, and add up a number by Gloo, which uses connections of its own between all of them.
"""

import errno
import hashlib
import ipaddress
import json
import os
import platform
import re
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil

from ddp_tutorial.paths import project_root
from ddp_tutorial.preflight import Findings, NotReady, in_time, last_line, stderr_into

# torchrun's c10d rendezvous takes a machine for dead whose last sign of life is older than this by their clocks.
KEEP_ALIVE = 15  # seconds
CLOCKS = 5  # seconds that clocks may differ: well below that
ATTEMPT = 3  # seconds for one attempt to connect
ALL_REDUCE = 15  # seconds for the machines to connect with each other and add up a number


def check_rendezvous(host, port, nodes, patience):
    """Print a line for each finding of this machine.

    Args:
        host, port: where the machines meet. The machine that has this address plays host.
        nodes: how many machines there are.
        patience: seconds to wait for the others.

    Returns the exit status: 0 when all machines can train together, else 1.
    """
    findings, meeting = Findings(), Meeting(host, port, nodes, patience)
    if all(findings.report(name, meeting.ask, step) for name, step in [
            ("name", meeting.name_facts), ("route", meeting.route_facts), ("port", meeting.port_facts),
            ("machines", meeting.machine_facts)]):
        findings.report("versions", meeting.version_facts)
        findings.report("clocks", meeting.ask, meeting.clock_facts)
        findings.report("all-reduce", meeting.ask, meeting.all_reduce_facts)
        meeting.part()
    status = findings.conclude(f"these {nodes} machines can train together")
    if meeting.stuck:
        sys.stdout.flush()
        os._exit(status)
    return status


class Meeting:
    """The facts about one rendezvous, as this machine sees them, to be asked for in the order they stand in."""

    def __init__(self, host, port, nodes, patience):
        self.host, self.port, self.nodes, self.patience = host, port, nodes, patience
        self.deadline = time.monotonic() + patience
        self.stuck = False  # whether a thread still waits for the other machines

    def ask(self, step):
        """What `step()` returns, NotReady where the machines lose each other."""
        try:
            return step()
        except NotReady:
            raise  # without importing PyTorch, which takes seconds, to learn that it is none of its errors
        except dist_error() as error:
            raise NotReady(f"the others do not answer any more ({short(error)})",
                           "see what they say, and run the command on all of them again") from None

    def name_facts(self):
        self.address = resolve(self.host)
        if self.address is None:
            raise NotReady(f"{self.host} does not resolve to an address",
                           f"give the address itself, or write '<address> {self.host}' into /etc/hosts")
        kind = ipaddress.ip_address(self.address.split("%")[0])
        if kind.is_unspecified or kind.is_multicast:
            raise NotReady(f"{self.host} is no machine's address",
                           "give an address by which the others reach the host")
        self.is_host = has_address(self.address)
        seen = f"{self.host} is {self.address}" if self.host != self.address else f"{self.host} needs none"
        return seen + (", this machine" if self.is_host else "")

    def route_facts(self):
        with socket.socket(family(self.address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.address, self.port))  # of a datagram socket: nothing is sent
            except OSError as error:
                raise NotReady(f"none to {self.address} ({error.strerror})",
                               f"join {self.host}'s network, or give an address of it that this machine reaches"
                               ) from None
            self.own_address = probe.getsockname()[0]
        return f"from {self.own_address}, interface {interface_of(self.own_address)}"

    def port_facts(self):
        error = dist_error()  # imports PyTorch, so that nothing slow stands between the next two lines
        # Machines that are only two terminals on one have one address: the first of them is the host.
        if self.is_host and self._cannot_connect() is None:
            self.is_host = False
        if self.is_host:
            try:
                self._open_store()
                return f"{self.port} was free here, and is open now"
            except RuntimeError as why:  # a port in use is a DistNetworkError only after PyTorch 2.6
                self.is_host = False
                if "EADDRINUSE" not in str(why):
                    raise NotReady(f"cannot listen on {self.port} ({short(why)})", "choose another port") from None
        while why := self._cannot_connect():
            if time.monotonic() > self.deadline:
                raise self._why_not(why)
            time.sleep(0.2)
        try:
            self._open_store()
        except error:
            raise NotReady(f"{self.port} on {self.host} answers, but not as this command would",
                           "run it on all machines at the same time; if you did, something else uses the port: choose"
                           " another") from None
        return f"{self.port} on {self.host} answers"

    def _cannot_connect(self):
        try:
            socket.create_connection((self.address, self.port), timeout=ATTEMPT).close()
        except OSError as error:
            return error

    def _open_store(self):
        import torch.distributed as dist

        with tempfile.TemporaryFile() as said, stderr_into(said):  # it fails with 50 lines of C++
            self.store = dist.TCPStore(self.address, self.port, is_master=self.is_host, wait_for_workers=False,
                                       timeout=timedelta(seconds=2 * ATTEMPT))
        self.store.set_timeout(timedelta(seconds=self.patience))

    def _why_not(self, error):
        if error.errno == errno.ECONNREFUSED:
            return NotReady(f"{self.host} refuses connections to {self.port}",
                            f"run this command on {self.host} at the same time, with the same port, and let its"
                            " firewall open it")
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return NotReady(f"cannot reach {self.address}:{self.port} ({why})",
                        f"see that {self.host} is on, that {self.address} is its address, and that no firewall between"
                        " drops the connection")

    def machine_facts(self):
        import torch

        self.number = 0 if self.is_host else self.store.add("machines", 1)
        if self.number >= self.nodes:
            raise NotReady(f"this is number {self.number + 1} of {self.nodes}", "give --nodes the number of machines")
        self._tell("machine", {
            "nodes": self.nodes, "name": socket.gethostname(), "address": self.own_address,
            "gloo address": address_for_gloo(), "host address": self.address,
            "PyTorch": str(torch.__version__), "Python": platform.python_version(),
            "this project": code_sha256()[:12],
        })
        self.machines, missing = self._all("machine")
        for machine in self.machines:
            if machine["nodes"] != self.nodes:
                raise NotReady(f"--nodes differs: {self.nodes} here, {machine['nodes']} on {machine['name']}",
                               "give all machines the same --nodes, the number of machines")
        if len(self.machines) > 1:  # the host's name may mean something else to the host itself
            self.machines[0]["address"] = self.machines[1]["host address"]
        names = ", ".join(f"{machine['name']} ({machine['address']})" for machine in self.machines)
        if missing:
            remedy = (f"run this command, with the same HOST:PORT, on all {self.nodes} machines within"
                      f" {self.patience:g} s")
            if self.address.startswith("127."):
                remedy = (f"give an address by which the others reach this machine: {self.address} is the machine"
                          " itself, for each of them")
            raise NotReady(f"{self.nodes - missing} of {self.nodes} came: {names}", remedy)
        return f"{self.nodes} of {self.nodes}: {names}"

    def version_facts(self):
        same = []
        for what in ("PyTorch", "Python", "this project"):
            versions = [machine[what] for machine in self.machines]
            # The last number of Python's version changes nothing that matters here.
            if len({version.rsplit(".", 1)[0] if what == "Python" else version for version in versions}) > 1:
                where = ", ".join(f"{version} on {m['name']}" for version, m in zip(versions, self.machines))
                raise NotReady(f"{what} differs: {where}", f"install the same {what} on all machines"
                               if what != "this project" else "copy scripts/ and ddp_tutorial/ to all machines anew")
            same.append(what if what == "this project" else f"{what} {versions[0]}")
        return f"{', '.join(same)}: the same everywhere"

    def clock_facts(self):
        # All wait for one key, so that they read their clocks at nearly the same moment.
        self._tell("waits", True)
        if self.is_host:
            self._all("waits")
            self.store.set("now", "")
        self.store.wait(["now"])
        self._tell("clock", time.time())
        clocks, _ = self._all("clock")
        apart = max(clocks) - min(clocks)
        if apart > CLOCKS:
            first, last = (self.machines[clocks.index(clock)]["name"] for clock in (max(clocks), min(clocks)))
            raise NotReady(f"{first} is {apart:.0f} s ahead of {last}",
                           f"set the clocks (NTP): torchrun's c10d rendezvous gives a machine up whose clock is"
                           f" {KEEP_ALIVE} s behind")
        return f"less than {max(1, round(apart + 0.5))} s apart"

    def all_reduce_facts(self):
        # In a thread: where the machines do not reach each other, some wait much longer than others.
        threading.Thread(target=self._all_reduce, daemon=True).start()
        deadline, failed, done = time.monotonic() + 2 * ALL_REDUCE, [], []
        while not failed and len(done) < self.nodes and time.monotonic() < deadline:
            time.sleep(0.05)
            done = [number for number in range(self.nodes) if self.store.check([f"sum {number}"])]
            sums = {number: json.loads(self.store.get(f"sum {number}")) for number in done}
            failed = [(number, why) for number, why in sums.items() if isinstance(why, str)]
        wanted = sum(range(1, self.nodes + 1))
        if failed or len(done) < self.nodes:
            where, why = failed[0] if failed else (self.number, f"nothing within {2 * ALL_REDUCE:g} s")
            raise NotReady(f"the machines meet, but not all can call each other ({why},"
                           f" {self.machines[where]['name']} says)", self._why_no_all_reduce())
        for number, got in sums.items():
            if got != [wanted]:
                raise NotReady(f"gloo: {self.machines[number]['name']} got {got}, wanted {wanted}",
                               "the network changes what it carries: have it mended")
        self.stuck = False
        return f"gloo: {' + '.join(map(str, range(1, self.nodes + 1)))} = {wanted} on every machine"

    def _all_reduce(self):
        import torch
        import torch.distributed as dist

        numbers = torch.full((1000,), self.number + 1)
        self.stuck = True
        with tempfile.TemporaryFile("w+", errors="replace") as said, stderr_into(said):
            try:
                dist.init_process_group("gloo", store=dist.PrefixStore("gloo", self.store), rank=self.number,
                                        world_size=self.nodes, timeout=timedelta(seconds=ALL_REDUCE))
                dist.all_reduce(numbers)
                result = numbers.unique().tolist()
                dist.destroy_process_group()
            except RuntimeError as error:
                said.seek(0)
                match = re.search(r"SO_ERROR: ([\w ]+), remote=\[([^]]+)\]", said.read())
                unsaid = "no connection" if "connectFullMesh" in str(error) else short(error)
                result = f"{match[1].lower()}: {match[2]}" if match else unsaid  # PyTorch 2.6 gives no reason
        self._tell("sum", result)

    def _why_no_all_reduce(self):
        wrong = [f"{machine['name']} tells the others to call {machine['gloo address']}, not {machine['address']}"
                 for machine in self.machines if machine["gloo address"] != machine["address"]]
        if not wrong:
            return "let the firewalls open all ports between them: Gloo and NCCL choose theirs freely"
        own = interface_of(self.machines[self.number]["address"])
        return (f"{'; '.join(wrong)}: that is where its host name leads; set GLOO_SOCKET_IFNAME there, and for GPUs"
                f" NCCL_SOCKET_IFNAME, to the interface of the right address ({own} on this machine)")

    def part(self):
        """The store ends with the host's process, so that one leaves last."""
        with suppress(dist_error()):
            self._tell("left", True)
            if self.is_host:
                self.deadline = time.monotonic() + ATTEMPT
                self._all("left")

    def _tell(self, what, value):
        self.store.set(f"{what} {self.number}", json.dumps(value))

    def _all(self, what):
        """What all machines told, and how many have not, when the patience is over."""
        keys = [f"{what} {number}" for number in range(self.nodes)]
        while not self.store.check(keys) and time.monotonic() < self.deadline:
            time.sleep(0.02)
        there = [key for key in keys if self.store.check([key])]
        return [json.loads(self.store.get(key)) for key in there], len(keys) - len(there)


def dist_error():
    """What torch.distributed raises; imported late, as PyTorch takes seconds and name and route need none."""
    import torch.distributed as dist

    return dist.DistError


def resolve(host, limit=10.0):
    """The address that `host` resolves to, IPv4 where there is one; None if there is none within `limit` seconds."""
    try:
        infos = in_time(limit, partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)) or []
    except (OSError, UnicodeError):  # UnicodeError: a part that is empty, or too long
        return None
    return next((info[4][0] for info in sorted(infos, key=lambda info: info[0] != socket.AF_INET)), None)


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def has_address(address):
    """Whether this machine has `address`: only then can it be bound."""
    with socket.socket(family(address)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def interface_of(address):
    """The name of the network interface with this address, such as eth0."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address.split("%")[0] for each in addresses]:
            return name
    return "lo" if address.startswith("127.") else "unknown"


def address_for_gloo():
    """The address that Gloo tells the others: that of GLOO_SOCKET_IFNAME, else of the host name, else loopback."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        addresses = psutil.net_if_addrs().get(chosen, [])
        return next((each.address for each in addresses if each.family == socket.AF_INET), "no address")
    address = resolve(socket.gethostname())
    return address if address and has_address(address) else "127.0.0.1"


def code_sha256():
    """Of the package and the scripts: machines with other code would not train the same."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, project_root() / "scripts"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def short(error):
    return last_line(error).split(". ")[0][:120]
