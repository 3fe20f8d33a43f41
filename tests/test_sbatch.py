"""ddp_tutorial.sbatch: each mistake is found, its faultless neighbour is not, and the real Slurm reads the same."""

import os
import re
import subprocess
import sys

import pytest
from needs import need
from slurm_lab import Slurm

from ddp_tutorial.sbatch import FLAGS, WITH_VALUE, main, problems, read

TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 train.py"
NODES = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n"
RANKS = NODES.replace("node=1", "node=8")
PORT = "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
ONE_CPU = "#SBATCH --cpus-per-task=4 --ntasks=1\n"

# What is wrong in which line, with a neighbour in which it is not. A file is "#!/bin/bash", this, and `true`.
MISTAKES = {
    "space": ("# SBATCH --nodes=2", 2, 'for Slurm "# SBATCH" begins a comment', "#SBATCH --nodes=2"),
    "lower case": ("#sbatch -N 2", 2, 'for Slurm "#sbatch" begins a comment', "# sbatch -N 2 train.sbatch"),
    "indented": ("  #SBATCH --nodes=2", 2, "write #SBATCH, at the line's beginning", "##SBATCH --nodes=2"),
    "late": ("cd work\n#SBATCH --nodes=2", 3, "only above the first command, in line 2", "#SBATCH --nodes=2\ncd work"),
    "variable": ("#SBATCH --output=$HOME/%j.out", 2, "%j is the job's number", "#SBATCH --output=%j.out"),
    "variable elsewhere": ("#SBATCH --time=$TIME", 2, "so $TIME stays as it is: write it out", "#SBATCH --time=1:00"),
    "tilde": ("#SBATCH --chdir=~/work", 2, "so ~/work stays as it is", "#SBATCH --chdir=/home/me/work"),
    "spaces around =": ("#SBATCH --nodes = 2", 2, "write --nodes=2", "#SBATCH --nodes 2"),
    "space after =": ("#SBATCH --nodes= 2", 2, "write --nodes=2", "#SBATCH --nodes=2"),
    "space before =": ("#SBATCH --nodes =2", 2, "write --nodes=2", "#SBATCH --nodes=2"),
    "short with =": ("#SBATCH -N=2", 2, "write -N2", "#SBATCH -N2"),
    "no value": ("#SBATCH --nodes", 2, "--nodes has no value: write --nodes=VALUE", "#SBATCH --requeue"),
    "no value after =": ("#SBATCH --nodes=", 2, "write --nodes=VALUE", "#SBATCH --nodes=1"),
    "no option": ("#SBATCH nodes=2", 2, '"nodes=2" is no option: write --nodes=2', "#SBATCH --nodes=2"),
    "two words": ("#SBATCH --job-name=a b", 2, "put quotes around", '#SBATCH --job-name="a b" # or "c"'),
    "open quote": ("#SBATCH --job-name='a", 2, "a quote is not closed", "#SBATCH --job-name='a'"),
    "cut short": ("#SBATCH --job-name=a#b", 2, "reads --job-name=a only up to the #", "#SBATCH --job-name='a#b' #c"),
    "misspelt": ("#SBATCH --ntask-per-node=2", 2, "write --ntasks-per-node", "#SBATCH --ntasks-per-node=2"),
    "underscores": ("#SBATCH --gpus_per_node=2", 2, "write --gpus-per-node", "#SBATCH --gpus-per-node=2"),
    "twice": ("#SBATCH --time=1:00\n#SBATCH -t 2:00", 3, "--time contradicts --time in line 2",
              "#SBATCH --time=1:00\n#SBATCH -t 1:00"),
    "opposite": ("#SBATCH --requeue\n#SBATCH --no-requeue", 3, "contradicts --requeue in line 2", "#SBATCH --requeue"),
    "memory": ("#SBATCH --mem=1G --mem-per-cpu=1G", 2, "--mem-per-cpu contradicts --mem", "#SBATCH --mem=1G"),
    "folder of a job": ("#SBATCH -o logs/%j/out", 2, "nobody can have made logs/%j", "#SBATCH -o logs/%j.out"),
    "uneven": ("#SBATCH --nodes=2 --ntasks=3", 2, "3 tasks do not divide over 2 nodes", "#SBATCH --nodes=2 -n 4"),
    "too many": ("#SBATCH --nodes=2\n#SBATCH --ntasks=5 --ntasks-per-node=2", 3, "5 tasks are more than 2 nodes",
                 "#SBATCH --nodes=2\n#SBATCH --ntasks=4 --ntasks-per-node=2"),
    "torchrun in each task": (f"{RANKS}srun {TORCHRUN}", 5, "srun starts 8 torchruns a node",
                              f"{NODES}srun {TORCHRUN}"),
    "the same by -n": (f"#SBATCH -N 2 -n 4\nsrun {TORCHRUN}", 3, "srun starts 2 torchruns a node",
                       f"#SBATCH -N 2 -n 4\nsrun --ntasks-per-node=1 {TORCHRUN}"),
    "python on one GPU": (f"{NODES}srun python train.py", 5, "srun starts 1 process a node, which has 8 GPUs",
                          f"{RANKS}srun python train.py"),
    "no tasks at all": ("#SBATCH --gres=gpu:a100:4\nsrun python3 train.py", 3, "write #SBATCH --ntasks-per-node=4",
                        "#SBATCH --gres=gpu:a100:4\nsrun hostname"),
    "one step alone": (f"{RANKS}srun --ntasks-per-node=4 python train.py", 5, "srun starts 4 processes a node",
                       f"{RANKS}srun --ntasks=1 python prepare.py"),
    "another number": (f"{NODES}srun torchrun --nproc_per_node=4 train.py", 5, "torchrun starts 4 a node",
                       f"{NODES}srun torchrun --nproc_per_node=gpu train.py"),
    "no number": (f"{NODES}srun python -m torch.distributed.run \\\n  train.py", 5, "torchrun starts 1 a node",
                  f"{NODES}srun python -m torch.distributed.run \\\n  --nproc-per-node 8 train.py"),
    "no srun": (f"{NODES}{TORCHRUN}", 5, "this runs on the first node only", f"{NODES}srun {TORCHRUN}"),
    "no srun, env": ("#SBATCH -N 2\nX=1 torchrun a.py &", 3, "this runs on the first node", "X=1 torchrun a.py &"),
    "no srun, by another program": ("#SBATCH -N 2\nenv X=1 torchrun a.py", 3, "this runs on the first node",
                                    "srun env X=1 torchrun a.py"),
    "too early": (f"{NODES}srun {TORCHRUN} --node-rank $SLURM_NODEID", 5, "the batch shell fills in $SLURM_NODEID",
                  f"{NODES}srun bash -c '{TORCHRUN} --node-rank $SLURM_NODEID'"),
    "too early, quoted": (f'{NODES}srun bash -c "{TORCHRUN} --node-rank $SLURM_NODEID"', 5, "in single quotes",
                          f'{NODES}srun bash -c "{TORCHRUN} --node-rank \\$SLURM_NODEID"'),
    "too early, assigned": ("export RANK=${SLURM_PROCID}", 2, "$SLURM_PROCID", "export RANKS=$SLURM_NTASKS"),
    "port": ("export MASTER_PORT=29500", 2, "another job on the same node may use port 29500", PORT),
    "port of torchrun": (f"srun {TORCHRUN} --master_port 29500", 2, "port 29500",
                         f'{PORT}\nsrun {TORCHRUN} --master_port "$MASTER_PORT"'),
    "port of an endpoint": (f"srun {TORCHRUN} --rdzv-endpoint=$A:29400", 2, "port 29400",
                            f"#SBATCH --exclusive\nsrun {TORCHRUN} --rdzv-endpoint=$A:29400"),
    "CPUs of a task": (f"{ONE_CPU}srun python train.py", 3, "srun does not take --cpus-per-task from the header",
                       f'{ONE_CPU}srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py'),
    "CPUs of a task, exported": (f"{ONE_CPU}srun python train.py", 3, "srun does not take --cpus-per-task",
                                 f"{ONE_CPU}export SRUN_CPUS_PER_TASK=4\nsrun python train.py"),
}  # fmt: skip


def file_with(lines):
    return f"#!/bin/bash\n{lines}\ntrue\n"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found_and_its_neighbour_is_not(mistake):
    wrong, line, said, right = MISTAKES[mistake]
    found = problems(file_with(wrong))
    assert len(found) == 1 and found[0].startswith(f"line {line}: ") and said in found[0], found
    assert problems(file_with(right)) == []


def test_a_file_that_slurm_refuses_as_a_whole():
    assert problems("true\n") == [
        "line 1: the first line must name the shell, and Slurm refuses this: write #!/bin/bash there"]
    assert problems("\n#!/bin/bash\n")[0].startswith("line 1: ")
    assert problems("#!/bin/bash\n#SBATCH -N 1\r\n")[0].startswith("line 2: the line ends as on Windows")
    assert problems("#!/bin/bash\n") == []


def test_what_is_text_is_no_command():
    """Comments, what is in quotes, and here-documents; and line numbers count their lines."""
    lines = f"""\
{NODES}# torchrun alone
echo "torchrun alone; $HOME" 'MASTER_PORT
' # torchrun alone
cat <<'END' > file
torchrun alone
export MASTER_PORT=29500
END
srun bash -c '
    {TORCHRUN} --node-rank $SLURM_NODEID
'"""
    assert problems(file_with(lines)) == []
    found = problems(file_with(f"{lines}\ntorchrun --nproc-per-node 8 train.py"))
    assert [line.split(":")[0] for line in found] == ["line 15"]


def test_read():
    text = file_with('#SBATCH -N2 --job-name="a # b" # two\n##SBATCH -n 4\n\n# why\n#SBATCH --requeue -t 1:00\n'
                     "#SBATCH --time 2:00 --exclusive=user -H\ncd work\n#SBATCH --ntasks=9")
    assert read(text) == {"nodes": "2", "job-name": "a # b", "requeue": True, "time": "2:00", "exclusive": "user",
                          "hold": True}


def test_the_folder_of_the_output(tmp_path):
    text = file_with("#SBATCH --output=logs/%j.out")
    assert problems(text, tmp_path) == [
        "line 2: Slurm makes no folders, and there is no logs: make it before you submit"]
    (tmp_path / "logs").mkdir()
    assert problems(text, tmp_path) == []


def test_command_line(tmp_path, capsys):
    good, bad = tmp_path / "good.sbatch", tmp_path / "bad.sbatch"
    good.write_text(file_with("#SBATCH -N 2"))
    bad.write_text(file_with("# SBATCH -N 2"))
    assert main([good]) == 0
    assert main([good, bad]) == 1
    assert capsys.readouterr().out.endswith(
        f'{good}: no classic mistake\n{bad}, line 2: for Slurm "# SBATCH" begins a comment: write #SBATCH\n')
    for files in ([], [tmp_path / "none"], [tmp_path]):
        assert main(files) == 2
        assert re.fullmatch(r"sbatch: .*: .*\n", capsys.readouterr().err)
    done = subprocess.run([sys.executable, "-m", "ddp_tutorial.sbatch", bad], capture_output=True, text=True)
    assert done.returncode == 1 and "line 2" in done.stdout


# --------------------------------------------------------------------------------------------------- the real Slurm

# Of these Slurm does what problems() says, or does not say.
HEADERS = [lines for wrong, _, _, right in MISTAKES.values() for lines in (wrong, right)] + [
    "#SBATCH--ntasks=3", "#SBATCH\t--ntasks=3", "#SBATCH --ntasks=3# three", "\n\n# three\n#SBATCH -n3",
    "#SBATCH --ntasks=3\n#SBATCH --ntasks=5", "#SBATCH --job-name='a b'\"c\" --ntasks=3", "x=1\n#SBATCH -n 3",
    "#SBATCH --ntasks=3\r", "#SBATCH --job-name=a\\ b",
]  # fmt: skip
COMPARED = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "job-name", "gpus-per-node"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    need("slurm")
    need("ip")
    with Slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def test_slurm_reads_the_same(slurm, tmp_path):
    """What Slurm refuses has a problem. Of the rest it finds the options that read() finds."""
    refused = 0
    for lines in dict.fromkeys(HEADERS):
        text = file_with(lines)
        (tmp_path / "file").write_text(text, newline="")
        process = slurm.start("sbatch", "-v", "--test-only", tmp_path / "file")
        _, said = process.communicate(timeout=20)
        defined = dict(re.findall(r"^sbatch: ([\w-]+) +: (.*)$", said, re.MULTILINE))
        if process.returncode and not defined:
            refused += 1
            assert problems(text), (lines, said)
        else:
            found = {name: value for name, value in read(text).items() if name in COMPARED}
            found = {name: value.split(":")[-1] for name, value in found.items()}
            defined = {name: value.split(":")[-1] for name, value in defined.items() if name in COMPARED}
            defined = {name: value.split("-")[0] if name == "nodes" else value for name, value in defined.items()}
            assert found == defined, (lines, said)
    assert 10 <= refused <= 20


def test_slurm_knows_these_options(slurm):
    said = slurm.run("sbatch", "--help")
    names = set(re.findall(r"--([a-z][a-z-]+)", said)) - {"option"}
    assert len(names) > 80
    assert names - {*FLAGS, *WITH_VALUE} == set()


def test_slurm_does_not_fill_in_variables(slurm, tmp_path):
    (tmp_path / "file").write_text(file_with("#SBATCH --output=$HOME/x.out --hold"))
    number = slurm.submit(tmp_path / "file", cwd=tmp_path)
    assert slurm.job(number)["StdOut"] == f"{tmp_path}/$HOME/x.out"


def test_slurm_makes_no_folders(slurm, tmp_path):
    (tmp_path / "file").write_text(file_with("#SBATCH --output=logs/%j/out"))
    number = slurm.submit(tmp_path / "file", cwd=tmp_path)
    assert slurm.wait(number, "COMPLETED", "FAILED")["JobState"] == "FAILED"
    assert os.listdir(tmp_path) == ["file"]


def test_srun_does_not_know_the_cpus_of_a_task_and_the_batch_shell_not_the_node(slurm, tmp_path):
    (tmp_path / "file").write_text(file_with(
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=4 --output=out\n"
        "srun -v true 2>&1 | grep cpus-per-task\n"
        'srun -v --cpus-per-task="$SLURM_CPUS_PER_TASK" true 2>&1 | grep -o "cpus-per-task  *: 4"\n'
        'srun bash -c "echo early $SLURM_NODEID"\n'
        "srun bash -c 'echo late $SLURM_NODEID'"))
    number = slurm.submit(tmp_path / "file", cwd=tmp_path)
    slurm.wait(number, "COMPLETED", "FAILED")
    lines = [re.sub(" +", " ", line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(lines) == ["cpus-per-task : 4", "early 0", "early 0", "late 0", "late 1"]
