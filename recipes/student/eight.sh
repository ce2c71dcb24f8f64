#!/usr/bin/env bash
# A student of eight experts against the same network from scratch at equal FLOPs.  SEED=0 bash recipes/student/eight.sh
# The experts and the network from scratch (the monolith) are those of ddm-vs-monolith: run it first. A student's sample costs
# 4/3 of a plain one, its teacher's forward pass included, so it has 3/4 as many.
set -euo pipefail
source recipes/common/lib.sh
samples=$((STEPS * TOTAL * 3 / 4))
train k8 --jobs student --student.samples $samples --student.block 6400 --train.batch $TOTAL --train.warmup $((samples / 20)) \
    --train.ema.ema $((samples / 40)) --train.save_every $((samples / 4))
measure k8 --models student monolith experts --routings top-1 --extractors inception efficientnet-lite0 --diversity 64 8
table k8
