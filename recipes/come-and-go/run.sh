#!/usr/bin/env bash
# Evaluate eight of nine experts, then all nine, then without one of the first eight. Nothing is retrained.
#     SEED=0 bash recipes/come-and-go/run.sh
# Run ddm-vs-monolith/run.sh first: it prepares the data. There is no router: nearest uses the densities that the experts store.
set -euo pipefail
source recipes/common/lib.sh
make_arm nine 9 features
train nine --jobs experts
make_arm eight-of-nine 9 features
reuse nine eight-of-nine 0 1 2 3 4 5 6 7
make_arm one-left 9 features
reuse nine one-left 0 1 3 4 5 6 7 8
for name in eight-of-nine nine one-left; do
    evaluate $name --models experts --routings nearest nearest:drawn --extractors inception efficientnet-lite0 --without diversity trajectories
done
table eight-of-nine nine one-left
