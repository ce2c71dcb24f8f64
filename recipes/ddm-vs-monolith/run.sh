#!/usr/bin/env bash
# DDM against the monolith at equal FLOPs: K = 2, 4, 8 by features, K = 8 at random, all routings.  SEED=0 bash …/run.sh
set -euo pipefail
source recipes/common/lib.sh
networks="--extractors inception efficientnet-lite0"
prepare
make_arm k8 8 features
dense=$((STEPS * TOTAL))
train k8 "monolith --train.batch $TOTAL --train.samples $dense --train.warmup $((dense / 10)) --train.ema.ema $((dense / 10))" \
    0 1 2 3 4 5 6 7 router
measure k8 --models experts monolith --routings top-1 top-2 full threshold-0.2 nearest oracle $networks
make_arm random8 8 random
train random8 0 1 2 3 4 5 6 7 router
measure random8 --routings top-1 full $networks
make_arm k4 4 features
train k4 0 1 2 3 router
measure k4 --routings top-1 top-2 full $networks
make_arm k2 2 features
train k2 0 1 router
measure k2 --routings top-1 full $networks
table k8 k4 k2 random8
