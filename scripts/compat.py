"""Build wheel and sdist, install them in empty environments, and run `scripts/smoke.py` with old and new versions.

    python scripts/compat.py python3.12 python3.11      # interpreters; the default is the one that runs this script

Every interpreter gets an environment with the newest core dependencies that pyproject.toml allows. In that of the last
one, diffusers, transformers and pydantic are then replaced by the oldest allowed version, one after the other.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPLACED = ("diffusers", "transformers", "pydantic")
COLUMNS = ("Python", "torch", *REPLACED, "smoke test")


def run(*command: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder outside of the repository, so that Python finds the installed package only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    text = [str(part) for part in command]
    return subprocess.run(text, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def build(folder: Path) -> Path:
    """Return the wheel; exit if the sdist does not give the same one, byte for byte."""
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")]
    subprocess.run(hatchling, cwd=ROOT, check=True)
    shutil.unpack_archive(next((folder / "dist").glob("*.tar.gz")), folder / "sdist")
    again = [*hatchling[:-1], str(folder / "again"), "-t", "wheel"]
    subprocess.run(again, cwd=next((folder / "sdist").iterdir()), check=True)
    wheel, other = (next((folder / name).glob("*.whl")) for name in ("dist", "again"))
    if wheel.read_bytes() != other.read_bytes():
        sys.exit(f"the wheel of the sdist differs from {wheel.name}")
    return wheel


def main() -> None:
    """Print the table as Markdown; the status is 1 if a row failed."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    oldest = [line.replace(">=", "==").split(",")[0] for line in dependencies if re.split("[<>=]", line)[0] in REPLACED]
    rows, passed = [], True
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel = build(folder)
        interpreters = sys.argv[1:] or [sys.executable]
        for number, interpreter in enumerate(interpreters, 1):
            python = folder / f"environment-{number}" / "bin" / "python"
            done = run(interpreter, "-m", "venv", python.parent.parent, folder=folder)
            if done.returncode:
                sys.exit(f"{interpreter} makes no environment: {done.stderr}")
            packages: list[object] = [wheel]
            for package in [None, *(sorted(oldest) if number == len(interpreters) else ())]:
                packages += [package] if package else []
                done = run(python, "-m", "pip", "install", "--quiet", *packages, folder=folder)
                if done.returncode == 0:
                    done = run(python, ROOT / "scripts" / "smoke.py", folder=folder)
                frozen = run(python, "-m", "pip", "freeze", folder=folder).stdout
                versions = {
                    name: version for name, _, version in (line.partition("==") for line in frozen.splitlines())
                }
                found = run(python, "--version", folder=folder).stdout.split()[-1:] or [interpreter]
                cells = [*found, *(versions.get(name, "-") for name in COLUMNS[1:-1])]
                rows.append([*cells, "passes" if done.returncode == 0 else "fails"])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
                if done.returncode:
                    passed = False
                    print(*done.stderr.splitlines()[-15:], sep="\n", file=sys.stderr, flush=True)
    for row in [COLUMNS, ["---"] * len(COLUMNS), *rows]:
        print(f"| {' | '.join(row)} |")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
