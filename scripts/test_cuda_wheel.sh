#!/usr/bin/env bash
# Test Atoll with the default wheel of torch, a CUDA build, on a machine without a GPU. Most users install this build.
# The environment in .venv-cuda (several gigabytes) is created once, and again when the requirements change.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/cuda_environment.sh

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
"$python" -m pytest tests/flow tests/nets tests/models tests/experts tests/train tests/data/test_pretrained.py tests/ensemble/test_sampling.py
