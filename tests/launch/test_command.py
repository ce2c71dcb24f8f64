"""Templates of `atoll launch --on command`, and which of its jobs count as queued."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import cli
from atoll.apps.share.lease_records import get_lease
from atoll.apps.share.leases import Lease
from atoll.apps.share.store import Store
from launch.test_launch import copy_run
from waiting import wait_for


@pytest.fixture
def run(prepared: Path, tmp_path: Path) -> Path:
    return copy_run(prepared, tmp_path / "it's a run")


def launch(run: Path, template: str, *options: str) -> int:
    return cli.main(["launch", str(run), "--jobs", "experts", "--on", "command", template, *options])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("qsub -N {name} {command}", ["qsub", "-N", "NAME", "SCRIPT"]),
        ("sbatch -c{cores} --wrap={command}", ["sbatch", "-c2", "--wrap=QUOTED"]),
        ("""sh -c "nice '{command}; x'" """, ["sh", "-c", "nice 'QUOTED; x'"]),
    ],
)
def test_the_script_is_one_word_or_quoted_for_a_shell(
    run: Path, template: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(run, template, "--print", "--island.cores", "2", "--experts", "1") == 0
    given = shlex.split(capsys.readouterr().out.splitlines()[1])
    script = str(run / "launch/command/experts/001.sh")
    known = {"NAME": r"atoll-\w{10}-experts-001", "SCRIPT": re.escape(script), "QUOTED": re.escape(shlex.quote(script))}
    for word, expected in zip(given, words, strict=True):
        pattern = re.sub("NAME|SCRIPT|QUOTED", lambda found: known[found[0]].replace("\\", "\\\\"), re.escape(expected))
        assert re.fullmatch(pattern.replace("\\\\", "\\"), word), (word, pattern)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("qsub x", (), "needs a template with {command}"),
        ("qsub '{command}", (), "No closing quotation"),
        ("qsub {command}", ("--island.nodes", "2"), "on one node"),
        ("qsub {command}", ("--max-parallel", "2"), "the scheduler decides"),
        ("no-such-scheduler {command}", (), "cannot run no-such-scheduler"),
        ("sh -c 'echo full >&2; false' {command}", (), "full"),
    ],
)
def test_errors(
    run: Path, template: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(run, template, *options) == 2
    assert message in capsys.readouterr().err
    assert not list(run.glob("launch/command/**/*.sh")), "a job that was not submitted must not count as queued"


def test_queued_jobs_are_not_submitted_again_and_dead_ones_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(run, "true {command}") == 0  # a queue that never starts a job
    capsys.readouterr()
    assert launch(run, "false {command}") == 0  # would fail if it submitted anything
    assert capsys.readouterr().err.count("already running (command-") == 3
    # A job begins and its machine dies: the process of its holder is gone.
    script = (run / "launch/command/experts/001.sh").read_text()
    submission = re.search(r"# submission: (\S+)", script)
    assert submission is not None
    code = "import sys; from atoll.apps.launch.supervisor import holder; print(holder(sys.argv[1]))"
    holder = subprocess.check_output([sys.executable, "-c", code, submission[1]], text=True).strip()
    store = Store.open(run)
    assert Lease.acquire(store, "experts/001", 1.0, holder=holder) is not None
    # Until its lease expires, the script may be about to repeat the attempt.
    wait_for(lambda: (found := get_lease(store, "experts/001")) is not None and found.expired)
    assert launch(run, "true {command}", "--json") == 0
    assert '"submitted": ["experts/001"]' in capsys.readouterr().out
