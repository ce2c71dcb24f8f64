"""Launcher for any scheduler: one script per step, submitted with a command of the user.

The scheduler needs no other interface than "run this file": the script sets the environment, repeats attempts that ask
for it, and removes itself at its end. A step is queued as long as its script exists and no attempt of it has ended.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from atoll.apps.launch.launcher import POLL_SECONDS, RETRY_CODE, SUBMISSION_VARIABLE, Launcher
from atoll.apps.launch.steps import Group, JobStep
from atoll.apps.launch.supervisor import LEASE_SECONDS
from atoll.apps.share.lease_records import get_lease
from atoll.apps.share.store import Store
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.progress import say

_SUBMISSION = "# submission: "
"""Start of the line of a script that names its submission."""


@dataclass
class Command(Launcher):
    """Submits each step with a template such as `qsub -N {name} {command}`.

    A scheduler that is not known cannot be asked to hold a job until others are done. So steps are submitted when the
    groups that they need are done: by a later launch, or by this one with `--wait`.
    """

    template: str = "{command}"
    _waiting: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the template."""
        if self.settings.island.nodes > 1:
            raise AtollError("--on command runs each job on one node; for several nodes use --on slurm or --on ray")
        if self.settings.max_parallel:
            raise AtollError("--max-parallel is for local and slurm; with --on command the scheduler decides")
        try:
            words = shlex.split(self.template)
        except ValueError as error:
            raise AtollError(f"--on command: {error} in {self.template!r}") from error
        if not any("{command}" in word for word in words):
            raise AtollError(
                f"--on command needs a template with {{command}}, the script to run, such as "
                f"'qsub -N {{name}} {{command}}'; given: {self.template!r}"
            )

    def active_steps(self, groups: Sequence[Group]) -> dict[str, str]:
        """Return the steps whose scripts exist, except for those whose last attempt has ended or expired."""
        store, found = Store.open(self.settings.run), {}
        for step in (step for group in groups for step in group.steps):
            try:
                lines = self._script(step).read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                continue
            submission = next(line.removeprefix(_SUBMISSION) for line in lines if line.startswith(_SUBMISSION))
            lease = get_lease(store, step.name)
            if lease is not None and submission in lease.record.holder.split(" "):
                # It has begun. Between two attempts its lease is released, or held by a killed one, for much less time
                # than a lease lasts.
                held = lease.record.state == "held" and not lease.expired
                if not held and not (lease.record.state == "released" and lease.age < LEASE_SECONDS):
                    continue
            found[step.name] = submission
        return found

    def show(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> str:
        """Return the commands and scripts of all steps."""
        del active
        lines = []
        for group in groups:
            lines.append(f"# {group.name}" + (f", after {', '.join(group.needs)}" if group.needs else ""))
            for step in group.steps:
                lines += [shlex.join(self._words(group, step)), self._text(group, step, "<submission>")]
        return "\n".join(lines)

    def submit(self, groups: Sequence[Group], active: Mapping[str, Sequence[str]]) -> None:
        """Submit the steps of the groups that need no unfinished group; the others wait."""
        unfinished = {group.name for group in groups} | {name for name, steps in active.items() if steps}
        self._waiting = [group for group in groups if unfinished & set(group.needs)]
        for group in groups:
            if group in self._waiting:
                needed = ", ".join(unfinished & set(group.needs))
                say(f"{group.name}: waits for {needed}; launch again when it is done, or use --wait", file=sys.stderr)
                continue
            for step in group.steps:
                self._submit_step(group, step)

    def wait(self, groups: Sequence[Group]) -> None:
        """Submit waiting groups when those that they need are done; return when nothing is queued or running."""
        store = Store.open(self.settings.run)
        while True:
            active = self.active_steps(groups)
            done = {
                group.name for group in groups
                if all(step.name not in active and (lease := get_lease(store, step.name)) is not None
                       and lease.record.state == "done" for step in group.steps)
            }  # fmt: skip
            known = {group.name for group in groups}
            ready = [group for group in self._waiting if known & set(group.needs) <= done]
            for group in ready:
                self._waiting.remove(group)
                for step in group.steps:
                    self._submit_step(group, step)
            if not active and not ready:
                return
            time.sleep(POLL_SECONDS)

    def _submit_step(self, group: Group, step: JobStep) -> None:
        script, submission = self._script(step), f"command-{uuid4().hex[:8]}"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(self._text(group, step, submission), encoding="utf-8")
        script.chmod(0o755)
        words = self._words(group, step)
        try:
            result = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except OSError as error:
            script.unlink()
            raise AtollError(f"cannot run {words[0]}: {error.strerror}") from error
        if result.returncode:
            script.unlink(missing_ok=True)
            raise AtollError(f"{shlex.join(words)}: {result.stderr.strip() or f'code {result.returncode}'}")
        say(f"{step.name}: submitted {result.stdout.strip()}".rstrip(), file=sys.stderr)

    def _script(self, step: JobStep) -> Path:
        return self.settings.run / layout.LAUNCH_COMMAND / f"{step.name}.sh"

    def _words(self, group: Group, step: JobStep) -> list[str]:
        """Return the words of the command that submits a step, which run without a shell."""
        script = str(self._script(step))
        _, _, gpus = self.settings.shape(group)
        values = {
            "{name}": f"atoll-{self.run_id}-{step.name.replace('/', '-')}",
            "{cores}": str(self.settings.island.cores or 1),
            "{gpus}": str(gpus),
        }
        words = shlex.split(self.template)
        for key, value in values.items():
            words = [word.replace(key, value) for word in words]
        # A word of its own is the path. Within a longer word, a shell may read it (`--wrap={command}`, `sh -c "…"`).
        return [script if word == "{command}" else word.replace("{command}", shlex.quote(script)) for word in words]

    def _text(self, group: Group, step: JobStep, submission: str) -> str:
        """Return the script of a step."""
        _, processes, _ = self.settings.shape(group)
        threads = max(1, (self.settings.island.cores or 1) // processes)
        lines = [
            "#!/bin/bash",
            f"{_SUBMISSION}{submission}",
            *self.settings.island.setup,
            f"export {SUBMISSION_VARIABLE}={shlex.quote(submission)} OMP_NUM_THREADS={threads}",
            # bash runs traps only between commands, so the attempt runs in the background, and gets the signal.
            "trap 'stop=1; kill -TERM $attempt' TERM USR1 INT",
            "while :; do",
            f"  {shlex.join(self.settings.command(group, step))} &",
            "  attempt=$!",
            "  wait $attempt; code=$?",
            '  if [ "$stop" ]; then wait $attempt; code=$?; break; fi',
            f"  [ $code -eq {RETRY_CODE} ] || [ $code -gt 128 ] || break",
            "  sleep 1",
            "done",
            f"rm -f {shlex.quote(str(self._script(step)))}",
            "exit $code",
        ]
        return "\n".join(lines) + "\n"
