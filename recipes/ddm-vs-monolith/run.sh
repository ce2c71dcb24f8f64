#!/usr/bin/env bash
# DDM against the monolith at equal FLOPs: K = 8, 4, 2 by features, K = 8 at random, all routings.  SEED=0 bash …/run.sh
# Controls: a monolith that makes eight times the steps with the small batch of an expert, one with twice the learning rate, and a
# router that is told nothing.
# CORE=1 leaves out all arms but the first, for further seeds.
set -euo pipefail
source recipes/common/lib.sh
few="--extractors inception efficientnet-lite0 --skip diversity trajectories"
prepare
make_arm k8 8 features
train k8 --jobs monolith experts router
if [ -n "${CORE:-}" ]; then
    measure k8 --models monolith experts --routings top-1 top-2 oracle nearest $few
    exit
fi
routings="top-1 top-2 oracle nearest full threshold-0.2"
measure k8 --models monolith experts --routings $routings --extractors inception efficientnet-lite0 --diversity 64 8
recipe=held-out measure k8 --models monolith experts --routings $routings --reference held-out $few diagnostics
for count in 4 2; do
    make_arm k$count $count features
    train k$count --jobs experts router
    measure k$count --models experts --routings top-1 top-2 oracle $few
done
make_arm random8 8 random
train random8 --jobs experts router
measure random8 --models experts --routings top-1 oracle full $few
TOLD=nothing make_arm untold 8 features
train untold --jobs router
take k8 untold 0 1 2 3 4 5 6 7
measure untold --models experts --routings top-1 top-2 $few
make_arm small-batch 8 features
train small-batch --jobs monolith --monolith.batch $((TOTAL / 8))
measure small-batch --models monolith $few
LR=8.0e-3 make_arm monolith-lr8 8 features
train monolith-lr8 --jobs monolith
measure monolith-lr8 --models monolith $few
table k8 k4 k2 random8 untold small-batch monolith-lr8
echo "against held-out pictures:"
recipe=held-out table k8
