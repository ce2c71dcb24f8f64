#!/usr/bin/env bash
# Experts that start from a converted DDPM checkpoint against the same experts from scratch.  SEED=0 bash …/run.sh
# The checkpoint is a class-conditional AdaLN-Zero DiT trained by DDPM on cluster 4 alone, so it has seen no picture of the
# experts that start from it. Those from scratch are of the recipe ddm-vs-monolith: run it first.
set -euo pipefail
source recipes/common/lib.sh
make_arm pretrained 8 features "{default: ddpm}"
samples=$((STEPS * TOTAL / 2))
train pretrained "expert 4 --networks.default.modulation zero --train.condition label --train.batch 64 \
    --train.samples $samples --train.warmup $((samples / 10)) --train.ema.ema $((samples / 10))"
start=$(arm pretrained)/converted
[ -d "$start" ] || $atoll convert "$(arm pretrained)/experts/004/final" "$start" --to flow-matching --text-width 384
make_arm converted 8 features
train converted "expert 0 --train.init $start" "expert 3 --train.init $start"
${ATOLL_PYTHON:-.venv/bin/python} recipes/converted-start/figures.py "$(arm k8)" "$(arm converted)" 0 3
