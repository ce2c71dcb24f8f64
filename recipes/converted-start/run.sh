#!/usr/bin/env bash
# A flow-matching expert that starts from another cluster's DDPM expert, against the same expert from scratch.
# The DDPM expert (cluster 0) is that of heterogeneous, the one from scratch (cluster 4) that of ddm-vs-monolith: run them first.
set -euo pipefail
source recipes/common/lib.sh
make_arm converted 8 features
train converted "expert 4 --train.init $(arm ddpm4)/experts/000/final"
${ATOLL_PYTHON:-.venv/bin/python} recipes/converted-start/figures.py "$(arm k8)" "$(arm converted)"
