#!/usr/bin/env bash
# Run the recipe with four experts: bash recipes/student/run.sh [RUN]
# You can interrupt it; running it again resumes.
set -euo pipefail
run=${1:-runs/student}
atoll=${ATOLL:-.venv/bin/atoll}
mkdir -p "$run"
if [ -f "$run/atoll.yaml" ] && ! cmp -s recipes/student/atoll.yaml "$run/atoll.yaml"; then
    echo "$run has other settings; remove it, or choose another folder" >&2
    exit 1
fi
cp recipes/student/atoll.yaml "$run/atoll.yaml"
$atoll launch "$run" --jobs prepare experts router student monolith
${ATOLL_PYTHON:-.venv/bin/python} recipes/student/metrics.py "$run"
