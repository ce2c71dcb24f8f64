#!/usr/bin/env bash
# DDM against the monolith at equal FLOPs: K = 8, 4, 2 by features, K = 8 at random, all routings.  SEED=0 bash …/run.sh
# Two controls: a monolith that makes eight times the steps with the small batch of an expert, and a router that is told nothing.
set -euo pipefail
source recipes/common/lib.sh
networks="--extractors inception efficientnet-lite0"
prepare
make_arm k8 8 features
dense k8
train k8 0 1 2 3 4 5 6 7 router
measure k8 --models monolith experts --routings ${ROUTINGS:-top-1 top-2 oracle nearest full threshold-0.2} $networks --diversity 64 8
[ -z "${CORE:-}" ] || exit 0 # further seeds need not repeat the arms below

make_arm small-batch 8 features
dense small-batch $((TOTAL / 8))
measure small-batch --models monolith $networks --skip diversity trajectories
TOLD=nothing make_arm untold 8 features
train untold router
take k8 untold 0 1 2 3 4 5 6 7
measure untold --models experts --routings top-1 top-2 $networks --skip diversity trajectories
for count in 4 2; do
    make_arm k$count $count features
    train k$count $(seq 0 $((count - 1))) router
    measure k$count --models experts --routings top-1 top-2 oracle $networks --skip diversity trajectories
done
make_arm random8 8 random
train random8 0 1 2 3 4 5 6 7 router
measure random8 --models experts --routings top-1 oracle full $networks --skip diversity trajectories
table k8 small-batch untold k4 k2 random8
