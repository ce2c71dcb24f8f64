#!/usr/bin/env bash
# Experts that come and go without any retraining: eight of nine, then the ninth comes, then one of the first leaves.
# SEED=0 bash recipes/come-and-go/run.sh (ddm-vs-monolith first: it prepares the data). There is no router: nearest knows only
# what each expert tells of its own cluster.
set -euo pipefail
source recipes/common/lib.sh
make_arm nine 9 features
train nine --jobs experts
make_arm eight-of-nine 9 features
take nine eight-of-nine 0 1 2 3 4 5 6 7
make_arm one-left 9 features
take nine one-left 0 1 3 4 5 6 7 8
for name in eight-of-nine nine one-left; do
    measure $name --models experts --routings nearest nearest:drawn --extractors inception efficientnet-lite0 --skip diversity trajectories
done
table eight-of-nine nine one-left
