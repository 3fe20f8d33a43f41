"""The laboratory: its machines are what it says they are, and nothing of them, or of a crash, stays behind.

Network namespaces need root and iproute2; processes as machines, on loopback, are tested everywhere.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from needs import need

from ddp_tutorial import lab

PYTHON = sys.executable
LIMIT = 60  # seconds for one command

SERVE = """
import socket
server = socket.create_server(("", {port}))
print("ready", flush=True)
connection, there = server.accept()
"""
ECHO = SERVE + """
print(there[0], flush=True)
while received := connection.recv(1000):
    connection.sendall(received)
"""
COUNT = """
import os, sys, time
name, number = sys.argv[1], 0
while True:
    number += 1
    with open(f"{name}.new", "w") as file:
        file.write(str(number))
    os.replace(f"{name}.new", name)
    time.sleep(0.01)
"""


def quiet(line):
    """For `say`."""


def new_name():
    return f"t{secrets.token_hex(4)}"


def on(name, number, code, *words):
    """Run Python code on a machine; returns what it printed."""
    command = lab.exec_command(number, [PYTHON, "-c", code, *words], name)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True).stdout


@contextmanager
def running(name, number, code, *words):
    """Python code that goes on on a machine while others do something."""
    command = lab.exec_command(number, [PYTHON, "-c", code, *map(str, words)], name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def alive(pid):
    """Of a process on Linux; one that has ended but was not waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remains(name):
    """What of a lab is there, in the places where one leaves something."""
    there = [*lab.NETNS.glob(f"ddp-{name}-*"), *lab.ETC_NETNS.glob(f"ddp-{name}-*")]
    there += [*lab.RUN.glob(f"ddp-lab-{name}.*"), *(lab.project_root() / "build" / "lab").glob(f"{name}.*")]
    return sorted(map(str, there))


@pytest.fixture
def name():
    """Of a lab that the test may make; it is taken down at the end."""
    name = new_name()
    yield name
    lab.down(name, say=quiet)
    assert remains(name) == []


def refusal(capsys, *words):
    """The one line that a command is refused with."""
    with pytest.raises(SystemExit) as ended:
        lab.main(list(words))
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err.removeprefix("lab: ").removesuffix("\n")


@pytest.fixture(autouse=True)
def sigterm():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


# ------------------------------------------------------------------------------------------- two machines, once made


@pytest.fixture(scope="module")
def two():
    need("ip")
    name = new_name()
    lab.up(machines=2, second_network=True, name=name, say=quiet)
    yield name
    lab.down(name, say=quiet)


def test_machines_have_names_and_addresses(two):
    look_up = ("import socket, sys; print(socket.gethostname(), *map(socket.gethostbyname, sys.argv[1:])); "
               "print(*sorted(name for _, name in socket.if_nameindex()))")
    addresses = [lab.address(number, two) for number in (0, 1)]
    assert addresses[0].startswith("10.77.") and addresses[0].endswith(".1") and addresses[1].endswith(".2")
    for number in (0, 1):
        found = on(two, number, look_up, "localhost", "node0", "node1").splitlines()
        assert found == [f"node{number} 127.0.0.1 {addresses[0]} {addresses[1]}", "eth0 lo mgmt0 mgmt0-end"]


def test_what_names_this_computers_network_is_not_passed_on(two, monkeypatch):
    for variable in lab.THIS_COMPUTERS:
        monkeypatch.setenv(variable, "lo")
    monkeypatch.setenv("DDP_TUTORIAL_DATA", "somewhere")
    show = "import os, sys; print([os.environ.get(name) for name in sys.argv[1:]])"
    assert on(two, 0, show, *lab.THIS_COMPUTERS, "DDP_TUTORIAL_DATA") == "[None, None, None, 'somewhere']\n"


def test_an_unknown_host_name_is_refused_at_once(two):
    code = """import socket, time
start = time.monotonic()
try:
    socket.gethostbyname("no-such-machine.example")
except socket.gaierror:
    print(time.monotonic() - start)
"""
    assert float(on(two, 0, code)) < 2
    if Path("/etc/nsswitch.conf").exists():
        services = on(two, 0, "print(open('/etc/nsswitch.conf').read())").splitlines()
        assert [line for line in services if line.startswith("hosts:")] == ["hosts: files"]


def test_nothing_waits_for_ipv6(two):
    assert on(two, 0, "print(open('/proc/net/if_inet6').read())").strip() == ""


def test_the_way_out_is_closed(two):
    code = """import socket
for where in ("192.0.2.1", "8.8.8.8"):
    try:
        socket.create_connection((where, 53), timeout=5)
    except OSError as error:
        print(error.strerror)
"""
    assert on(two, 0, code).splitlines() == ["Network is unreachable"] * 2


def test_a_cut_machine_does_not_answer_and_a_healed_one_does(two):
    """A connection stays open meanwhile, as over a cable that is pulled out and put back."""
    talk = """import socket, sys, time
connection = socket.create_connection((sys.argv[1], 29500), timeout=10)
for line in sys.stdin:
    connection.settimeout(float(line))
    connection.sendall(b"!")
    try:
        print("answer", connection.recv(10), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""
    with running(two, 0, ECHO.format(port=29500)) as server:
        assert server.stdout.readline() == "ready\n"
        with running(two, 1, talk, "node0") as client:
            def answer_within(seconds):
                client.stdin.write(f"{seconds}\n")
                client.stdin.flush()
                return client.stdout.readline().strip()

            assert answer_within(10) == "answer b'!'"
            assert server.stdout.readline().strip() == lab.address(1, two)
            for _ in range(2):
                lab.cut(0, two)
            assert links(two) == ["cut", "up"]
            assert answer_within(0.5) == "silence"
            for _ in range(2):
                lab.heal(0, two)
            assert links(two) == ["up", "up"]
            assert answer_within(20) in ("answer b'!'", "answer b'!!'")


def test_a_machine_that_gets_no_connection_is_told(two, monkeypatch):
    monkeypatch.setattr(lab, "SETTLE", 0.1)
    lab.cut(1, two)
    with pytest.raises(lab.LabError, match="^node1 got no connection within 0.1 s: try again$"):
        lab._wait_for_network(lab.state(two), [0, 1])
    lab.heal(1, two)


def links(name):
    said = []
    assert lab.status(name, say=said.append) == 0
    return [line.split()[3] for line in said[2:]]


def test_a_machine_is_cut_when_a_file_appears(two, tmp_path, capsys):
    there = tmp_path / "now"
    command = [PYTHON, "-m", "ddp_tutorial.lab", "cut", "1", "--name", two, "--when", str(there)]
    with subprocess.Popen(command) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert links(two) == ["up", "up"]
        there.touch()
        assert process.wait(LIMIT) == 0
    assert links(two) == ["up", "cut"]
    lab.heal(1, two)
    said = refusal(capsys, "cut", "1", "--name", two, "--when", f"{there}2", "--patience", "0.2")
    assert said == f"{there}2 did not appear within 0.2 s: machine 1 was not cut off"
    assert links(two) == ["up", "up"]


def test_the_command_is_the_process_that_was_started(two, tmp_path):
    """Same process, folder, environment and signals as without a lab; its exit status is the caller's."""
    code = """import json, os, signal, sys
print(json.dumps([os.getpid(), os.getcwd(), dict(os.environ), sys.argv[1:]]), flush=True)
sys.stdin.read()
sys.exit(7)
"""
    words = [PYTHON, "-c", code, "--", "-x", "a  b", "node1"]
    seen = []
    for command in (words, lab.exec_command(1, words, two)):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
            pid, *rest = json.loads(process.stdout.readline())
            assert pid == process.pid
            process.stdin.close()
            assert process.wait(LIMIT) == 7
        seen.append(rest)
    assert seen[0] == seen[1]
    signals = ["grep", "SigIgn", "/proc/self/status"]  # not Python, which ignores some itself
    assert subprocess.check_output(signals) == subprocess.check_output(lab.exec_command(1, signals, two))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_command(two, number):
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); time.sleep(60)"
    with running(two, 0, code) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(LIMIT) == -number


def test_the_second_network_leads_nowhere(two):
    own, other = (lab.address(number, two).replace("10.77", "10.78") for number in (0, 1))
    code = """import socket, sys
socket.create_server((sys.argv[1], 0))
try:
    socket.create_connection((sys.argv[2], 22), timeout=0.5)
except OSError as error:
    print(type(error).__name__)
"""
    assert on(two, 0, code, own, other) in ("TimeoutError\n", "OSError\n")  # nobody, not ConnectionRefusedError


def test_an_up_is_refused_while_something_runs_there(two, capsys):
    with running(two, 1, "print(flush=True); input()") as process:
        process.stdout.readline()
        said = refusal(capsys, "up", "--machines", "1", "--name", two)
        assert said == f"processes still run on the machines of lab {two} ({process.pid}): end them with down first"
        assert process.poll() is None
    assert links(two) == ["up", "up"]


def test_what_does_not_exist_is_refused(two, capsys):
    in_lab = ("--name", two)
    assert refusal(capsys, "cut", "2", *in_lab) == f"there is no machine 2: lab {two} has machines 0 to 1"
    assert refusal(capsys, "exec", "-1", *in_lab, "--", "ls").startswith("there is no machine -1")
    assert refusal(capsys, "cut", "1", *in_lab, "--patience", "nan").startswith("--patience nan is no number")
    assert refusal(capsys, "exec", "0", *in_lab, "--", "no-such-command") == "there is no command no-such-command"


# ---------------------------------------------------------------------------------------------------- made to order


@pytest.fixture
def machines():
    need("ip")


def test_up_shows_a_table_and_replaces_what_was_there(machines, name, capsys):
    assert lab.main(["up", "--machines", "1", "--name", name])["machines"] == 1
    network = lab.address(0, name).rpartition(".")[0]
    lab.main(["up", "--machines", "2", "--name", name, "--bandwidth", "100", "--own-name", "127.0.1.1"])
    assert capsys.readouterr().out == f"""\
lab {name}: network namespaces
machine  host name  address    limits
0        node0      {network}.1  none
replacing lab {name}
lab {name}: network namespaces
machine  host name  address    limits
0        node0      {network}.1  100 Mbit/s
1        node1      {network}.2  100 Mbit/s
on each machine its own host name means 127.0.1.1
"""
    assert lab.state(name)["mode"] == "network namespaces"
    lab.status(name)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"1        node1      {network}.2  up    tbf rate 100Mbit")


@pytest.mark.parametrize("own_name, wanted", [("127.0.1.1", "127.0.1.1"), ("second", "10.78.{}.2")])
def test_a_machine_may_have_another_name_for_itself(machines, name, own_name, wanted):
    made = lab.up(machines=2, own_name=own_name, second_network=True, name=name, say=quiet)
    code = "import socket; print(*map(socket.gethostbyname, ('node0', 'node1')))"
    assert on(name, 1, code).split() == [lab.address(0, name), wanted.format(made["network"])]


def test_bandwidth_is_limited_in_both_directions(machines, name):
    """Seconds that 1 MB takes: from one machine to one at 5 and at 20 Mbit/s, and from each of two to one at 20."""
    receive = """import socket, sys, threading, time
server = socket.create_server(("", 29500))
print("ready", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[1]))]
start = time.monotonic()
def read(connection):
    connection.sendall(b"go")
    while connection.recv(100_000):
        pass
readers = [threading.Thread(target=read, args=[connection]) for connection in connections]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
print(time.monotonic() - start, flush=True)
"""
    send = """import socket
connection = socket.create_connection(("node0", 29500))
connection.recv(2)
connection.sendall(bytes(1_000_000))
"""

    def seconds(senders):
        with running(name, 0, receive, len(senders)) as receiver:
            receiver.stdout.readline()
            started = [subprocess.Popen(lab.exec_command(number, [PYTHON, "-c", send], name)) for number in senders]
            taken = float(receiver.stdout.readline())
            assert [process.wait(LIMIT) for process in started] == [0] * len(senders)
            return taken

    lab.up(machines=2, bandwidth=5, name=name, say=quiet)
    slow = seconds([1])
    lab.up(machines=3, bandwidth=20, name=name, say=quiet)
    fast, shared = seconds([1]), seconds([1, 2])
    # No faster than the limit, less what the buckets hold at the start; a busy computer may be slower.
    assert 1.5 < slow < 4 and 0.35 < fast and 0.7 < shared
    assert 2.5 < slow / fast < 5
    assert 1.5 < shared / fast < 3


def test_latency_and_loss(machines, name, capsys):
    """Where the kernel cannot do that, it is refused and nothing stays behind."""
    lab.up(machines=1, name=name, say=quiet)
    probe = ["tc", "-n", f"ddp-{name}-0", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    has_netem = subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0
    lab.down(name, say=quiet)
    if not has_netem:
        for option in ("--latency", "--loss"):
            said = refusal(capsys, "up", "--machines", "2", option, "20", "--name", name, "--or-loopback")
            assert said == ("this kernel has no netem (module sch_netem), which --latency and --loss need: "
                            "leave that out, or use another kernel")
            assert remains(name) == []
        return
    lab.up(machines=2, latency=50, name=name, say=quiet)
    with running(name, 0, ECHO.format(port=29500)) as server:
        server.stdout.readline()
        connect = "import socket, time; t = time.monotonic(); socket.create_connection(('node0', 29500))"
        assert 0.1 <= float(on(name, 1, f"{connect}; print(time.monotonic() - t)")) < 2
    lab.up(machines=2, loss=100, name=name, say=quiet)
    with pytest.raises(subprocess.CalledProcessError):
        on(name, 1, "import socket; socket.create_connection(('node0', 29500), timeout=1)")


BUCKET = "tbf rate 10.000000mbit burst 5000b latency 100ms"


@pytest.mark.parametrize("options, wanted", [
    ({"latency": 5.0}, ["eth0 netem limit 10000 delay 5.000000ms loss 0.000000%"]),
    ({"loss": 0.5}, ["eth0 netem limit 10000 delay 0.000000ms loss 0.500000%"]),
    ({"bandwidth": 10.0}, [f"node1 {BUCKET}", f"eth0 {BUCKET}"]),
    ({"bandwidth": 10.0, "latency": 1.0},
     [f"node1 {BUCKET}", "eth0 netem limit 10000 delay 1.000000ms loss 0.000000% rate 10.000000mbit"]),
])
def test_what_the_kernel_is_asked_for(monkeypatch, options, wanted):
    asked = []
    monkeypatch.setattr(lab, "_run", lambda *words: asked.append(words))
    made = {"bandwidth": None, "latency": None, "loss": None, "namespaces": ["a", "b"], "switch": "s"}
    lab._limit(made | options, 1)
    assert [" ".join([words[6], *words[8:]]) for words in asked] == wanted


def test_two_labs_at_once_do_not_meet(machines):
    names = [new_name(), new_name()]
    command = [PYTHON, "-m", "ddp_tutorial.lab", "up", "--machines", "2"]
    try:
        with lab._locked(lab.NAMESPACES):
            started = [subprocess.Popen([*command, "--name", name], stdout=subprocess.DEVNULL) for name in names]
            with pytest.raises(subprocess.TimeoutExpired):  # one at a time
                started[0].wait(0.5)
            assert remains(names[0]) == remains(names[1]) == []
        assert [process.wait(LIMIT) for process in started] == [0, 0]
        ours, theirs = (lab.address(0, name) for name in names)
        assert ours != theirs
        with running(names[1], 0, SERVE.format(port=29500)) as server:
            server.stdout.readline()
            reach = "import socket, sys; socket.create_connection((sys.argv[1], 29500), timeout=5)"
            on(names[1], 1, reach, theirs)
            with pytest.raises(subprocess.CalledProcessError):
                on(names[0], 1, reach, theirs)
        lab.down(names[0], say=quiet)
        assert links(names[1]) == ["up", "up"] and remains(names[0]) == []
    finally:
        for name in names:
            lab.down(name, say=quiet)


def test_nothing_of_this_computer_changes(machines, name):
    """Neither while the machines are there nor afterwards."""
    def seen():
        addresses = json.loads(subprocess.check_output(["ip", "-j", "address"]))
        for interface in addresses:
            for each in interface["addr_info"]:
                for lifetime in ("valid_life_time", "preferred_life_time"):  # of what DHCP gave: it runs down
                    each.pop(lifetime, None)
        routes = subprocess.check_output(["ip", "-j", "-4", "route", "show", "table", "all"])
        names = [Path("/etc", file).read_bytes() for file in ("hosts", "resolv.conf") if Path("/etc", file).exists()]
        laid_over = [line for line in Path("/proc/mounts").read_text().splitlines() if " /etc/" in line]
        return addresses, routes, names, laid_over, socket.gethostname()

    before = seen()
    lab.up(machines=2, bandwidth=100, second_network=True, name=name, say=quiet)
    assert len(remains(name)) == 3 + 2 + 1  # namespaces, folders of names, what is known
    assert seen() == before
    lab.down(name, say=quiet)
    assert seen() == before and remains(name) == []


def test_an_empty_folder_of_names_goes_too(machines, name, monkeypatch, tmp_path):
    """`ip` itself looks in /etc/netns, so that the machines of this test do not know their names."""
    monkeypatch.setattr(lab, "ETC_NETNS", tmp_path / "etc" / "netns")
    lab.up(machines=1, name=name, say=quiet)
    assert [path.name for path in lab.ETC_NETNS.iterdir()] == [f"ddp-{name}-0"]
    (lab.ETC_NETNS / "somebody's").mkdir()
    lab.down(name, say=quiet)
    assert [path.name for path in lab.ETC_NETNS.iterdir()] == ["somebody's"]
    (lab.ETC_NETNS / "somebody's").rmdir()
    lab.up(machines=1, name=name, say=quiet)
    lab.down(name, say=quiet)
    assert not lab.ETC_NETNS.exists()


def test_down_ends_what_runs_there(machines, name):
    """Also what does not listen to SIGTERM, is frozen, or was started by something that is gone."""
    lab.up(machines=2, name=name, say=quiet)
    code = """import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "sleep 100 & echo $!"])
print(os.getpid(), flush=True)
time.sleep(100)
"""
    with running(name, 0, code) as deaf, running(name, 1, "print(flush=True); input()") as frozen:
        pids = [int(deaf.stdout.readline()), int(deaf.stdout.readline()), frozen.pid]
        frozen.stdout.readline()
        frozen.send_signal(signal.SIGSTOP)
        assert [alive(pid) for pid in pids] == [True] * 3
        start = time.monotonic()
        lab.down(name, say=quiet)
        assert lab.GRACE < time.monotonic() - start < lab.GRACE + 5
        assert wait_until(lambda: not any(map(alive, pids)))
        assert (deaf.wait(LIMIT), frozen.wait(LIMIT)) == (-signal.SIGKILL, -signal.SIGTERM)


def test_what_others_made_stays(machines, name, capsys):
    others = f"ddp-{name}-0"
    subprocess.run(["ip", "netns", "add", others], check=True)
    try:
        said = refusal(capsys, "up", "--machines", "1", "--name", name, "--or-loopback")
        assert said == f"there is a network namespace {others} already, which is no lab's: choose another --name"
        assert (lab.NETNS / others).exists()
    finally:
        subprocess.run(["ip", "netns", "delete", others], check=True)


# --------------------------------------------------------------------------------------------------- failures, crashes


@pytest.fixture
def at_call(monkeypatch):
    """at_call(k, action): from now on the k-th call of a command of iproute2 does `action` first."""
    run = lab._run

    def arrange(number, action):
        calls = iter(range(1, 10_000))

        def counted(*words):
            if next(calls) == number:
                action()
            return run(*words)

        monkeypatch.setattr(lab, "_run", counted)

    return arrange


def fail():
    raise lab.ToolFailed("ip link: out of luck")


def test_an_up_that_fails_at_any_step_leaves_nothing(machines, name, at_call):
    for number in range(1, 100):
        at_call(number, fail)
        try:
            lab.up(machines=1, second_network=True, bandwidth=10, name=name, say=quiet)
        except lab.LabError as error:
            assert "out of luck" in str(error)
            assert lab.state(name) is None and remains(name) == []
        else:
            break
    at_call(0, fail)
    assert 15 < number < 40
    assert links(name) == ["up"]


def test_where_it_fails_loopback_is_used_instead(machines, name, at_call):
    at_call(6, fail)
    said = []
    assert lab.up(machines=1, or_loopback=True, name=name, say=said.append)["mode"] == "loopback"
    assert said[0] == ("no network namespaces: this computer makes no machines (ip link: out of luck): "
                       "use one where you may do that (a container must be privileged)")
    assert remains(name) == [str(lab.project_root() / "build" / "lab" / f"{name}.json")]


def in_a_child(action):
    """Call `action` in a forked process; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except SystemExit as ended:
            os._exit(ended.code)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_up_killed_at_any_step_is_cleared_away(machines, name, at_call):
    """By the next down, or by the next up, which then makes its own."""
    for number in range(1, 100):
        at_call(number, kill_me)
        if in_a_child(lambda: lab.up(machines=1, second_network=True, name=name, say=quiet)) == 0:
            break
        at_call(0, kill_me)
        if number % 3:
            assert lab.state(name) is None
            lab.down(name, say=quiet)
            assert remains(name) == []
        else:
            said = []
            lab.up(machines=1, name=name, say=said.append)
            assert said[0] == f"removing what an interrupted up or down of lab {name} left"
            assert links(name) == ["up"]
            lab.down(name, say=quiet)
    assert 15 < number < 40


def test_a_down_killed_at_any_step_can_be_repeated(machines, name, at_call, capsys):
    for number in range(1, 100):
        at_call(0, kill_me)
        lab.up(machines=1, name=name, say=quiet)
        at_call(number, kill_me)
        if in_a_child(lambda: lab.down(name, say=quiet)) == 0:
            break
        assert lab.state(name) is None and lab.main(["status", "--name", name]) == 1
        assert capsys.readouterr().out == f"lab {name} is half made or half removed: run down\n"
        at_call(0, kill_me)
        lab.down(name, say=quiet)
        assert remains(name) == []
    assert number == 7  # two namespaces are looked through twice, and deleted


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_up_that_is_ended_clears_away_what_it_made(machines, name, at_call, number, status):
    at_call(8, lambda: os.kill(os.getpid(), number))
    with open(os.devnull, "w") as nowhere:
        def quiet_up():
            os.dup2(nowhere.fileno(), 1)
            lab.main(["up", "--machines", "1", "--name", name])

        assert in_a_child(quiet_up) == status
    assert remains(name) == []


# ------------------------------------------------------------------------------------------------------ refusals


OR_LOOPBACK = ", or add --or-loopback to make do with processes on 127.0.0.1"


@pytest.mark.parametrize("words, said", [
    (["up", "--machines", "0"], "0 machines cannot be made: choose 1 to 16"),
    (["up", "--machines", "17"], "17 machines cannot be made: choose 1 to 16"),
    (["up"], "the following arguments are required: --machines (--help lists the options)"),
    (["up", "--machines", "2", "--name", "a b"], '"a b" cannot name a lab: use up to 30 letters and digits'),
    (["up", "--machines", "2", "--own-name", "here"],
     '"here" is no IPv4 address: write one such as 127.0.1.1, or second'),
    (["up", "--machines", "2", "--own-name", "second"], "--own-name second needs --second-network: add it"),
    (["up", "--machines", "2", "--loss", "101"], "--loss 101 cannot be had: choose a number above 0, and up to 100"),
    (["up", "--machines", "2", "--bandwidth", "nan"],
     "--bandwidth nan cannot be had: choose a number above 0, and up to 100000"),
    (["up", "--machines", "2", "--latency", "0"],
     "--latency 0 cannot be had: choose a number above 0, and up to 60000"),
    (["exec", "0"], "write it as: exec N -- COMMAND"),
    (["exec", "0", "--"], "write it as: exec N -- COMMAND"),
    (["cut", "0", "--", "ls"], "cut takes no command"),
    (["exec", "0", "--name", "no", "--", "ls"],
     "no lab no is up: python -m ddp_tutorial.lab up --machines 2 makes one"),
])
def test_what_cannot_be_done_is_refused_in_one_line(capsys, words, said):
    assert refusal(capsys, *words) == said


def forget(what):
    """A change that takes something from this computer."""
    def change(monkeypatch):
        if what == "Linux":
            monkeypatch.setattr(lab, "LINUX", False)
        if what == "root":
            monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
        if what == "ip":
            monkeypatch.setattr(lab.shutil, "which", lambda *words, **more: None)

    return change


@pytest.mark.skipif(not lab.LINUX, reason="elsewhere it is refused before")
@pytest.mark.parametrize("what, said", [
    ("Linux", "network namespaces exist on Linux only: use Linux"),
    ("root", "making machines needs root: put sudo before the command"),
    ("ip", "the command ip is missing: install iproute2"),
])
def test_without_what_it_needs_it_is_refused(name, capsys, monkeypatch, what, said):
    with monkeypatch.context() as change:
        change.setattr(lab.os, "geteuid", lambda: 0)
        forget(what)(change)
        assert refusal(capsys, "up", "--machines", "2", "--name", name) == said + OR_LOOPBACK
    assert remains(name) == []


@pytest.mark.skipif(not lab.LINUX or os.geteuid() != 0, reason="a lab of root's can be made by root only")
@pytest.mark.parametrize("command", ["up", "exec", "cut", "heal", "status", "down"])
def test_machines_of_root_are_left_alone_by_others(machines, two, capsys, monkeypatch, command):
    words = {"up": ["--machines", "1", "--or-loopback"], "exec": ["0"], "cut": ["0"], "heal": ["0"]}
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        lab.main([command, *words.get(command, []), "--name", two, *["--", "ls"] * (command == "exec")])
    said = capsys.readouterr().err
    assert said == (f"lab: machines of lab {two} are network namespaces, "
                    "and making machines needs root: put sudo before the command\n")


def test_a_computer_that_forbids_namespaces_is_told_so(machines, name, capsys):
    """Root without the right to administrate, as in most containers."""
    if not shutil.which("setpriv"):
        pytest.skip("setpriv (util-linux) is missing")
    command = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"]
    command += [PYTHON, "-m", "ddp_tutorial.lab", "up", "--machines", "2", "--name", name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1
    assert run.stderr.startswith("lab: this computer makes no machines (ip netns add ")
    assert "Operation not permitted" in run.stderr and run.stderr.endswith(OR_LOOPBACK + "\n")
    assert remains(name) == []


def test_starting_a_command_is_quick():
    code = "import sys; import ddp_tutorial.lab; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([PYTHON, "-c", code], text=True) == "False False\n"


def test_without_a_lab_status_and_down_say_so(capsys):
    name = new_name()
    assert lab.main(["status", "--name", name]) == 1
    assert lab.main(["down", "--name", name]) is None
    assert capsys.readouterr().out == f"lab {name} is not up\nlab {name} is not up: nothing to do\n"


# ------------------------------------------------------------------------------------- processes instead of machines


@pytest.fixture
def loopback(name, monkeypatch, tmp_path):
    """A lab of two machines that are processes; the project's folder is one for this test."""
    monkeypatch.setattr(lab, "why_no_namespaces", lambda: "it is forbidden: ask")
    said = []
    lab.up(machines=2, bandwidth=10.0, own_name="127.0.1.1", or_loopback=True, name=name, say=said.append)
    assert said == [
        "no network namespaces: it is forbidden: ask",
        "on loopback without effect: --bandwidth, --own-name",
        f"lab {name}: loopback",
        "machine  host name  address    limits",
        "0        node0      127.0.0.1  none",
        "1        node1      127.0.0.1  none",
    ]
    return name


def test_on_loopback_all_host_names_are_its_address(loopback, monkeypatch):
    code = "import sys; print(*sys.argv[1:])"
    words = ["node0:29500", "tcp://node1:1", "--node-rank", "anode0", "node", "--rdzv-endpoint=node12"]
    assert on(loopback, 1, code, *words).split() == [
        "127.0.0.1:29500", "tcp://127.0.0.1:1", "--node-rank", "anode0", "node", "--rdzv-endpoint=127.0.0.1"]
    show = "import os; print(os.environ['MASTER_ADDR'], os.environ['DDP_TUTORIAL_DATA'])"
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("DDP_TUTORIAL_DATA", "node0")
    assert on(loopback, 1, show).split() == ["127.0.0.1", "node0"]
    assert lab.address(1, loopback) == "127.0.0.1" and lab.state(loopback)["mode"] == "loopback"


def test_on_loopback_signals_and_exit_statuses_pass(loopback):
    assert subprocess.run(lab.exec_command(0, [PYTHON, "-c", "raise SystemExit(7)"], loopback)).returncode == 7
    with running(loopback, 0, "import time; print(flush=True); time.sleep(60)") as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(LIMIT) == -signal.SIGTERM


TREE = """
import os, subprocess, sys
count, folder = sys.argv[1:3]
own = lambda name, **more: subprocess.Popen([sys.executable, "-c", count, f"{folder}/{name}"], **more)
started = [own("child"), own("session", start_new_session=True), own("forgetful", env={})]
orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan, count, f"{folder}/orphan"])
print(flush=True)
started[0].wait()
"""


def counts(folder):
    """How far each process of TREE has counted, once all have."""
    names = ("child", "session", "forgetful", "orphan")
    assert wait_until(lambda: all((folder / name).exists() for name in names))
    return [int((folder / name).read_text()) for name in names]


def frozen(folder):
    before = counts(folder)
    time.sleep(0.3)
    return [after == then for then, after in zip(before, counts(folder))]


def test_a_machine_that_is_processes_is_cut_by_freezing_them(loopback, tmp_path, capsys):
    for machine in ("0", "1"):
        (tmp_path / machine).mkdir()
    with running(loopback, 0, TREE, COUNT, tmp_path / "0"), running(loopback, 1, TREE, COUNT, tmp_path / "1"):
        assert not any(frozen(tmp_path / "0") + frozen(tmp_path / "1"))
        for _ in range(2):
            lab.cut(1, loopback)
        assert frozen(tmp_path / "1") == [True] * 4
        assert frozen(tmp_path / "0") == [False] * 4
        assert links(loopback) == ["up", "cut"]
        said = refusal(capsys, "exec", "1", "--name", loopback, "--", "ls")
        assert said == "machine 1 is frozen: heal it first"
        with pytest.raises(lab.LabError, match=f"^processes still run on the machines of lab {loopback} "):
            lab.up(machines=1, or_loopback=True, name=loopback, say=quiet)
        for _ in range(2):
            lab.heal(1, loopback)
        assert frozen(tmp_path / "1") == [False] * 4
        assert links(loopback) == ["up", "up"]
        lab.cut(0, loopback)
        lab.down(loopback, say=quiet)
        assert frozen(tmp_path / "0") == frozen(tmp_path / "1") == [True] * 4  # ended
        assert remains(loopback) == []


def test_a_frozen_machine_keeps_its_connections_and_does_not_answer(loopback):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running(loopback, 1, ECHO.format(port=port)) as server:
        server.stdout.readline()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"1")
            assert connection.recv(10) == b"1"
            lab.cut(1, loopback)
            connection.sendall(b"2")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(10)
            lab.heal(1, loopback)
            connection.settimeout(20)
            assert connection.recv(10) == b"2"
