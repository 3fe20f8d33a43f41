"""A real Slurm for as long as a test needs it: a controller and two nodes on this machine, sealed off from it."""

import os
import subprocess
import time

# The nodes say that they have more than this machine, so that the headers of real clusters fit.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=cluster(10.0.0.1)
SlurmUser=root
# A job that is put back in the queue starts once its old credential has expired: 120 s if nothing is said here.
AuthInfo=socket=/run/munge.socket,cred_expire=5
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/%n.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
GresTypes=gpu
NodeName=node[0-1] NodeHostname=cluster NodeAddr=10.0.0.[1-2] Port=[17001-17002] CPUs=64 Gres=gpu:8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
HOSTS = "127.0.0.1 localhost\n10.0.0.1 cluster node0\n10.0.0.2 node1\n"

# The first process of its own namespaces. Its standard input is closed when the test ends, however it ends; then this
# process ends, and with it the kernel kills all others, jobs included.
CLUSTER = """\
set -e
mount --bind "$1" /run
mount --bind /run/hosts /etc/hosts
hostname cluster
ip link set lo up
# Names are looked up only where there is an address that is not 127.0.0.1.
ip address add 10.0.0.1 dev lo
ip address add 10.0.0.2 dev lo
munged --foreground --force --key-file /run/munge.key --socket /run/munge.socket \
    --pid-file /run/munged.pid --log-file /run/munged.log --seed-file /run/munged.seed &
until [ -S /run/munge.socket ]; do sleep 0.05; done
slurmctld -D &
# Whoever asks a controller that does not listen yet, asks again much later.
until scontrol ping | grep -q UP; do sleep 0.1; done
slurmd -D -N node0 &
slurmd -D -N node1 &
until [ "$(sinfo --noheader --partition=low --format=%D%T)" = 2idle ]; do sleep 0.1; done
touch /run/ready
read -r _ || true
"""


class Slurm:
    """Two nodes, node0 and node1, of 64 CPUs and 8 GPUs in name only, and two partitions.

    Jobs in `low`, the usual one, have 60 s to make room for those in `high`. Jobs run as root, with the environment
    of their sbatch, and see this machine's files. Several of these do not see each other.
    """

    def __init__(self, folder, environment=None):
        """folder: an empty one for state and logs. environment: of all commands, in place of this process's."""
        self.folder = folder
        # Tests may run in a job of another Slurm.
        self.environment = {name: value for name, value in (environment or os.environ).items()
                            if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment |= {"SLURM_CONF": "/run/slurm.conf",
                             "PATH": f"{self.environment.get('PATH', '')}:/usr/sbin:/sbin"}

    def __enter__(self):
        for name in ("state", "node0", "node1"):
            (self.folder / name).mkdir()
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "slurm.conf").write_text(CONFIGURATION)
        (self.folder / "gres.conf").write_text("NodeName=node[0-1] Name=gpu File=/run/gpu[0-7]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # never used, but looked for
        (self.folder / "hosts").write_text(HOSTS)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))
        with open(self.folder / "said.txt", "w") as said:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc",
                 "--propagation", "private", "bash", "-c", CLUSTER, "bash", self.folder],
                stdin=subprocess.PIPE, stdout=said, stderr=said, env=self.environment, start_new_session=True)
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_until_ready(self, patience=30):
        """patience: seconds."""
        deadline = time.monotonic() + patience
        while self.process.poll() is None and time.monotonic() < deadline:
            if (self.folder / "ready").exists():
                return
            time.sleep(0.05)
        raise AssertionError("Slurm did not start:\n" + (self.folder / "said.txt").read_text())

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(10)

    def start(self, *command, cwd="/"):
        """Start a command inside, with pipes for its output."""
        target = self.process.pid
        enter = ["nsenter", f"--target={target}", "--mount", "--net", "--uts",
                 f"--pid=/proc/{target}/ns/pid_for_children", f"--wd={cwd}"]
        return subprocess.Popen([*enter, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, encoding="utf-8", stdin=subprocess.DEVNULL, env=self.environment)

    def run(self, *command, cwd="/"):
        """What the command printed, on standard output and then on standard error; it must succeed."""
        process = self.start(*command, cwd=cwd)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{' '.join(map(str, command))}: exit status {process.returncode}\n{out}{err}"
        return out + err

    def submit(self, *words, cwd):
        """The number of the job that `sbatch words` makes."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd))

    def job(self, number):
        """What `scontrol show job` says, as a dictionary: JobState, Restarts, ExitCode, StdOut, NumNodes…"""
        said = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait(self, number, *states, patience=60):
        """Wait until a job is in one of `states`; returns job(number)."""
        deadline = time.monotonic() + patience
        while (job := self.job(number))["JobState"] not in states:
            output = job.get("StdOut")
            said = open(output).read() if output and os.path.exists(output) else ""
            assert time.monotonic() < deadline, f"{job['JobState']}, and not {states} within {patience} s:\n{said}"
            time.sleep(0.2)
        return job
