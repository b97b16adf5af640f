"""What stands behind `--`: torchrun's form is taken apart, other launchers are refused with the right form."""

from __future__ import annotations

import pytest

from ckptd.chaos.command import Command, CommandError, agreed, parse_command

FILES = ("train.py", "src/train.py", "run.sh", "./accelerate")
LEFT_OUT = ("--standalone", "--rdzv-backend", "--max-restarts")


def parse(line: str) -> Command:
    return parse_command(line.split(), is_file=lambda name: name in FILES)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train.py", Command(script=("train.py",))),
        ("src/train.py --nnodes 3 -m x", Command(script=("src/train.py", "--nnodes", "3", "-m", "x"))),
        ("-m package.train --lr 1", Command(script=("-m", "package.train", "--lr", "1"))),
        ("torchrun train.py --x", Command(script=("train.py", "--x"))),
        ("torchrun --nproc-per-node 4 train.py", Command(script=("train.py",), nproc=4)),
        ("torchrun --nproc_per_node=4 --nnodes=2:2 train.py", Command(script=("train.py",), nproc=4, nnodes=2)),
        ("/opt/bin/torchrun --nnodes 1 -m package.train a", Command(script=("-m", "package.train", "a"), nnodes=1)),
        (
            "torchrun --standalone --rdzv-backend c10d --max-restarts=3 --nproc-per-node 2 train.py",
            Command(script=("train.py",), nproc=2, left_out=("--standalone", "--rdzv-backend", "--max-restarts=3")),
        ),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", Command(script=("train.py",), nproc=2)),
        ("python3.11 -m torch.distributed.run train.py", Command(script=("train.py",))),
        ("torchrun -- train.py", Command(script=("train.py",))),
        ("./accelerate launch", Command(script=("./accelerate", "launch"))),
    ],
)
def test_script_and_numbers_are_taken_out_of_a_command(line: str, command: Command) -> None:
    """A script, a module, or torchrun's own form, with all its spellings."""
    assert parse(line) == command


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "there is no script; the right form: -- train.py ..."),
        ("other.py", "there is no script 'other.py'"),
        ("--nproc 2 train.py", "'--nproc' is no script; options of `ckptd chaos run` stand before the --"),
        ("run.sh", "'run.sh' is no Python script; name the one that it starts: -- train.py ..."),
        ("-m", "-m needs the name of a module; the right form: -- -m package.train ..."),
        ("-m src/train.py", "-m needs the name of a module"),
        ("python train.py --x 1", "leave 'python' out: -- train.py --x 1"),
        ("python3 -u train.py", "leave 'python3' out: -- train.py"),
        ("/usr/bin/python3.12 -m package.train", "leave '/usr/bin/python3.12' out: -- -m package.train"),
        (
            "python -m torch.distributed.launch train.py",
            "torch.distributed.launch is no longer used; write -- torchrun ...",
        ),
        ("accelerate launch --num_processes 2 train.py --lr 1", "name the script alone: -- train.py --lr 1"),
        ("deepspeed train.py", "deepspeed cannot be started under the harness"),
        ("mpirun -n 4 python train.py", "name the script alone: -- train.py"),
        ("bash run.sh", "bash cannot be started under the harness"),
        ("torchrun", "torchrun is given no script; the right form: -- torchrun train.py ..."),
        ("torchrun --nproc-per-node", "'--nproc-per-node' has no value"),
        (
            "torchrun --nproc-per-node gpu train.py",
            "says 'gpu': counting devices is not supported here; say a number, or --nproc N",
        ),
        (
            "torchrun --nnodes 1:4 train.py",
            "says '1:4': elastic jobs are not supported here; say a number, or --nnodes N",
        ),
        ("torchrun --nnodes=0 train.py", "--nnodes=0 says '0'"),
        ("torchrun --no-python run.sh", "torchrun's option '--no-python' is not known here"),
        (
            "torchrun --frobnicate 3 train.py --lr 1",
            "'--frobnicate' is not known here; name the script alone: -- train.py --lr 1",
        ),
        ("torchrun other.py", "there is no script 'other.py'"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_right_form(line: str, text: str) -> None:
    """The message ends with what to write instead."""
    with pytest.raises(CommandError) as refused:
        parse(line)
    assert text in str(refused.value)


def test_a_number_is_said_once() -> None:
    """Option, torchrun line, or neither; both only where they agree."""
    assert agreed("--nproc", None, None, 2) == 2
    assert agreed("--nproc", 3, None, 2) == agreed("--nproc", None, 3, 2) == agreed("--nproc", 3, 3, 2) == 3
    with pytest.raises(CommandError, match="--nproc is 3, but torchrun is told 4; say it once"):
        agreed("--nproc", 3, 4, 2)
