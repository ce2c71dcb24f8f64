#!/usr/bin/env bash
# Everything of this recipe, resumable: bash recipes/student/run.sh [RUN]
set -euo pipefail
run=${1:-runs/student}
atoll=${ATOLL:-.venv/bin/atoll}
mkdir -p "$run"
cp recipes/student/atoll.yaml "$run/atoll.yaml"
$atoll prepare "$run"
for expert in 0 1 2 3; do $atoll train "$run" --expert $expert; done
$atoll train "$run" --router
$atoll train "$run" --student
# From scratch with the student's FLOPs, its teachers' forward passes included: 4/3 as many samples.
$atoll train "$run" --monolith --train.samples 17056
${ATOLL_PYTHON:-.venv/bin/python} recipes/student/figures.py "$run"
