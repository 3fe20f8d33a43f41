"""scripts/slurm/*.sbatch on a real Slurm of two nodes: finished, preempted, out of time, failed, cancelled."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import OPTIONS, forked
from needs import need
from slurm_lab import Slurm
from test_scripts import ENVIRONMENT, ROOT, eventually
from test_torchrun_elastic import running, snapshots

from ddp_tutorial.sbatch import problems

FILES = ["srun", "torchrun"]
TRAINING = [*OPTIONS, "--limit", 2000, "--batch-size", 25, "--epochs", 2, "--snapshot-every", 5]  # 80 steps
ONE_RANK_A_NODE = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
RECORD = ROOT / "docs" / "09_slurm.txt"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    need("slurm")
    need("ip")
    commands = tmp_path_factory.mktemp("bin")  # what an environment that is active has in its PATH
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    path = f"{commands}:{ENVIRONMENT['PATH']}"
    with Slurm(tmp_path_factory.mktemp("slurm"), ENVIRONMENT | {"PATH": path}) as lab:
        yield lab


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of two ranks that nobody disturbs, without Slurm."""
    report = tmp_path_factory.mktemp("whole") / "report.json"
    forked("09", 2, *TRAINING, "--json", report)
    return json.loads(report.read_text())["rank_params_sha256"]


@pytest.fixture
def project(tmp_path):
    """A folder in which to submit: it has the scripts, and its own build/."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    return tmp_path


class Job:
    """A training that has been submitted in `project`, with options of sbatch first."""

    def __init__(self, slurm, project, file, *options, sbatch=ONE_RANK_A_NODE):
        self.slurm, self.project = slurm, project
        self.report = project / "report.json"
        self.words = [*sbatch, f"scripts/slurm/{file}.sbatch", *options]
        self.number = slurm.submit(*self.words, "--json", self.report, cwd=project)
        self.folder = project / "build" / f"slurm-{self.number}"  # the files say so

    def has_snapshots(self):
        eventually(lambda: len(snapshots(self.folder)) > 1, 60, "snapshots")

    def ranks(self):
        """The process ids of all ranks."""
        pids = []
        for pid in running(self.project):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if words[0] == sys.executable and "torch.distributed.run" not in words:
                pids.append(pid)
        return pids

    def freeze(self):
        """So that the training is not over before Slurm has done what it does. SIGCONT lets it go on."""
        pids = self.ranks()
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def wait(self, *states):
        return self.slurm.wait(self.number, *states, patience=90)

    def output(self):
        path = self.project / f"ddp-{self.number}.out"
        return path.read_text().replace("\r", "\n") if path.exists() else ""

    def said(self, pattern):
        """Wait for the line of its output that matches."""
        found = eventually(lambda: re.search(f"^.*{pattern}.*$", self.output(), re.M), 60, pattern)
        return found[0]

    def result(self):
        return json.loads(self.report.read_text())


def moved(job):
    """The step after which a job stopped, and that after which it went on."""
    output = job.output()
    return [int(re.search(rf"^{word} after step (\d+) of 80", output, re.M)[1]) for word in ("stopped", "resumed")]


@pytest.mark.parametrize("file", FILES)
def test_09_header_is_accepted(slurm, file):
    """As it stands, for 2 machines with 8 GPUs and 64 CPUs; and it has none of the classic mistakes."""
    path = ROOT / "scripts" / "slurm" / f"{file}.sbatch"
    assert "using 128 processors on nodes node[0-1] in partition low" in slurm.run("sbatch", "--test-only", path)
    assert problems(path.read_text()) == []
    subprocess.run(["bash", "-n", path], check=True)


def is_pending(number, pid):
    """Whether a frozen process has been sent a signal that it will see when it goes on."""
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(mask, 16) >> number - 1 & 1


@pytest.mark.parametrize("file", FILES)
def test_09_time_is_nearly_over(slurm, project, whole, file):
    """As --signal=B:USR1@120 does it: a snapshot, back into the queue, and on from there."""
    job = Job(slurm, project, file, *TRAINING)
    job.has_snapshots()
    ranks = job.freeze()
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)
    eventually(lambda: all(is_pending(signal.SIGTERM, rank) for rank in ranks), 20, "SIGTERM")
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    job.said("stopped after step")
    assert job.wait("PENDING")["Restarts"] == "1"
    end = job.wait("COMPLETED", "FAILED")
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("COMPLETED", "1", "0:0"), job.output()
    assert "DUE TO JOB REQUEUE" not in job.output().partition("stopped after step")[0], "the ranks were given time"
    stopped, resumed = moved(job)
    assert 10 <= stopped == resumed < 80
    assert job.result()["rank_params_sha256"] == whole
    assert job.result()["resumed_after"] == stopped


URGENT = """\
#!/bin/bash
#SBATCH --job-name=urgent --partition=high --nodes=2 --exclusive
until [[ -e go ]]; do sleep 0.1; done
"""


def test_09_preempted(slurm, project, whole):
    """Slurm asks the job to make room for one that is more important; it comes back when that has ended."""
    transcript = []

    def queue(*states):
        """Wait until the jobs in the queue have these states, the oldest first, and write it down."""
        columns = "%.7j %.9P %.8T %.5D"

        def listed():
            text = slurm.run("squeue", "--sort=i", f"--format={columns}")
            return text.split()[6::4] == [*states] and text

        said = eventually(listed, 60, f"{states} in the queue")
        transcript.append(f'$ squeue --sort=i --format="{columns}"\n{said}')

    def says(line):
        line = line.replace(f"{project}/", "").replace(f"-{job.number}", "-JOB")
        transcript.append(f"the training says:\n  {line}\n")

    (project / "urgent.sbatch").write_text(URGENT)
    job = Job(slurm, project, "srun", *TRAINING, sbatch=["--partition=low", *ONE_RANK_A_NODE])
    submitted = " ".join(["$ sbatch", *map(str, job.words)])
    transcript.append(re.sub(" (scripts/|--limit)", r" \\\n    \1", submitted) + "\n")
    job.has_snapshots()
    queue("RUNNING")
    job.freeze()  # Slurm sends SIGCONT before SIGTERM
    urgent = slurm.submit("urgent.sbatch", cwd=project)
    transcript.append("$ sbatch urgent.sbatch      # in partition high, and it wants both machines for itself\n")
    says(job.said("stopped after step"))
    queue("PENDING", "RUNNING")
    (project / "go").touch()
    slurm.wait(urgent, "COMPLETED")
    transcript.append("the urgent job has ended\n")
    queue("RUNNING")
    says(job.said("resumed after step"))
    end = job.wait("COMPLETED", "FAILED")
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), job.output()
    says(job.said(r"epoch 2/2: .* right").split(", ")[0])
    stopped, resumed = moved(job)
    assert 10 <= stopped == resumed == job.result()["resumed_after"] < 80
    assert job.result()["rank_params_sha256"] == whole
    transcript.append(f"steps on record: {job.result()['steps']}; started again by Slurm: {end['Restarts']} time")

    text = "\n".join(transcript) + "\n"
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "09_slurm.txt").write_text(text)  # which notebook 09 shows, from docs/
    without_figures = [re.sub(r"step \d+|loss [\d.]+", "", each) for each in (text, RECORD.read_text())]
    assert without_figures[0] == without_figures[1]


def test_09_unequal_numbers_of_tasks(slurm, project, tmp_path):
    """Three ranks on two machines: Slurm describes them as 2,1."""
    options = [*OPTIONS, "--limit", 400]
    job = Job(slurm, project, "srun", *options, sbatch=[
        "--gpus-per-node=2", "--nodes=2", "--ntasks=3", "--ntasks-per-node=2", "--cpus-per-task=1"])
    report = tmp_path / "reference.json"
    forked("09", 3, *options, "--json", report)
    assert job.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", job.output()
    assert job.result()["rank_params_sha256"] == json.loads(report.read_text())["rank_params_sha256"]
    assert job.result()["world_size"] == 3
    assert "threads: 1 in each of 2 processes" in job.output(), "what rank 0 was told of its own machine"


def test_09_a_rank_that_dies_ends_the_job_of_srun(slurm, project):
    """Also where another rank hangs, and would never notice."""
    job = Job(slurm, project, "srun", *TRAINING)
    job.has_snapshots()
    hangs, dies = job.ranks()
    os.kill(hangs, signal.SIGSTOP)
    os.kill(dies, signal.SIGKILL)
    end = slurm.wait(job.number, "FAILED", "COMPLETED", "PENDING", patience=30)
    assert (end["JobState"], end["Restarts"]) == ("FAILED", "0"), job.output()
    eventually(lambda: running(project) == {}, 15, "the end of all processes")


def test_09_a_rank_that_dies_ends_the_job_of_torchrun(slurm, project):
    job = Job(slurm, project, "torchrun", *TRAINING, "--kill-after", 10)
    job.said("killed after step 10")
    end = slurm.wait(job.number, "FAILED", "COMPLETED", "PENDING", patience=30)
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("FAILED", "0", "1:0"), job.output()
    eventually(lambda: running(project) == {}, 15, "the end of all processes")


def test_09_cancelled(slurm, project):
    job = Job(slurm, project, "srun", *TRAINING)
    job.has_snapshots()
    assert len(running(project)) >= 2
    slurm.run("scancel", job.number)
    eventually(lambda: running(project) == {}, 15, "the end of all processes")
    job.said("stopped after step")
    end = job.wait("CANCELLED")
    assert end["Restarts"] == "0"
    assert slurm.run("squeue", "--noheader") == ""
