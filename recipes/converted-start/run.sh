#!/usr/bin/env bash
# Train experts from a converted DDPM checkpoint, and the same experts from scratch.
#     SEED=0 bash recipes/converted-start/run.sh
# The checkpoint is a class-conditional AdaLN-Zero DiT trained with DDPM on cluster 4 alone, so it has seen no image of the
# experts that start from it. Run ddm-vs-monolith/run.sh first: it prepares the data. The learning rate is constant: a
# decreasing schedule lowers the loss by itself and would distort the time to reach a given loss.
set -euo pipefail
source recipes/common/lib.sh
export LR=2.0e-3 LR_SCHEDULE=constant
make_arm pretrained 8 features "{default: ddpm}"
images=$((STEPS * TOTAL / 4))
train pretrained --jobs experts --experts 4 --networks.default.modulation zero --train.conditioning label --train.batch_size 64 \
    --train.total_images $images --train.warmup_images $((images / 20)) --train.ema.ema $((images / 40))
start=$(arm pretrained)/converted
[ -f "$start/conversion.json" ] ||
    $atoll convert "$(arm pretrained)/experts/004/final" "$start" --to flow-matching --text-width 384 --force
make_arm scratch 8 features
make_arm converted 8 features
train scratch --jobs experts --experts 0 3
train converted --jobs experts --experts 0 3 --train.init_from "$start"
${ATOLL_PYTHON:-.venv/bin/python} recipes/converted-start/metrics.py "$(arm scratch)" "$(arm converted)" 0 3
