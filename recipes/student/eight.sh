#!/usr/bin/env bash
# Distill eight experts into a student, and compare it with the same network from scratch at equal FLOPs.
#     SEED=0 bash recipes/student/eight.sh
# Run ddm-vs-monolith/run.sh first: it trains the experts and the network from scratch (the monolith). With its teacher's
# forward pass, an image costs the student 4/3 of the usual FLOPs, so it sees 3/4 as many.
set -euo pipefail
source recipes/common/lib.sh
images=$((STEPS * TOTAL * 3 / 4))
train k8 --jobs student --student.total_images $images --student.block 6400 --train.batch_size $TOTAL --train.warmup_images $((images / 20)) \
    --train.ema.ema $((images / 40)) --train.save_every $((images / 4))
evaluate k8 --models student monolith experts --routings top-1 --extractors inception efficientnet-lite0 --diversity 64 8
table k8
