#!/usr/bin/env bash
# Experts that start from a converted DDPM checkpoint against the same experts from scratch.  SEED=0 bash …/run.sh
# The checkpoint is a class-conditional AdaLN-Zero DiT trained by DDPM on cluster 4 alone, so it has seen no picture of the
# experts that start from it. ddm-vs-monolith first: it prepares the data. The learning rate is constant: under a
# schedule that falls, the loss falls with it, and the time to reach one would tell of the schedule.
set -euo pipefail
source recipes/common/lib.sh
export LR=2.0e-3 DECAY=constant
make_arm pretrained 8 features "{default: ddpm}"
samples=$((STEPS * TOTAL / 4))
train pretrained --jobs experts --experts 4 --networks.default.modulation zero --train.condition label --train.batch 64 \
    --train.samples $samples --train.warmup $((samples / 20)) --train.ema.ema $((samples / 40))
start=$(arm pretrained)/converted
[ -f "$start/conversion.json" ] ||
    $atoll convert "$(arm pretrained)/experts/004/final" "$start" --to flow-matching --text-width 384 --force
make_arm scratch 8 features
make_arm converted 8 features
train scratch --jobs experts --experts 0 3
train converted --jobs experts --experts 0 3 --train.init_from "$start"
${ATOLL_PYTHON:-.venv/bin/python} recipes/converted-start/metrics.py "$(arm scratch)" "$(arm converted)" 0 3
