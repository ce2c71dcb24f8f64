"""Write requirements/locked.txt: the versions of constraints.txt with the hashes of their files on PyPI.

    python scripts/lock.py        # after a change of constraints.txt; needs a network

Pip refuses a file with another hash: pip install --no-deps --require-hashes -r requirements/locked.txt
"""

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ROOT / "requirements" / "locked.txt"
HEADER = "# Written by scripts/lock.py from constraints.txt: every version with the hashes of its files on PyPI.\n"


def pins() -> dict[str, str]:
    """Return the pinned versions by package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def hashes(name: str, version: str) -> list[str]:
    """Return the SHA-256 of every file of a release."""
    with urllib.request.urlopen(f"https://pypi.org/simple/{canonicalize_name(name)}/", timeout=60) as response:
        links = re.findall(r'#sha256=([0-9a-f]{64})"[^>]*>([^<]+)</a>', response.read().decode())
    found = sorted({digest for digest, file in links if _version(file) == Version(version)})
    if not found:
        raise SystemExit(f"{name}=={version} is not on PyPI")
    return found


def _version(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def main() -> None:
    """Write the file."""
    found = pins()
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda pair: hashes(*pair), found.items()))
    blocks = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in known)])
        for (name, version), known in zip(found.items(), digests, strict=True)
    ]
    LOCKED.write_text(HEADER + "\n".join(blocks) + "\n", encoding="utf-8")
    print(f"wrote {LOCKED}: {len(blocks)} packages")


if __name__ == "__main__":
    main()
