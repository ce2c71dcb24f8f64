#!/usr/bin/env bash
# Experts that come and go without any retraining: seven, then an eighth, then one of the first leaves.  SEED=0 bash …/run.sh
# The experts and the router are those of ddm-vs-monolith: run it first. The router was trained for all eight clusters and
# is renormalised over those that are there; nearest knows only what each expert tells of its own cluster.
set -euo pipefail
source recipes/common/lib.sh
make_arm without7 8 features
take k8 without7 0 1 2 3 4 5 6
make_arm without2 8 features
take k8 without2 0 1 3 4 5 6 7
for name in without7 k8 without2; do
    measure $name --models experts --routings nearest top-1 --extractors inception efficientnet-lite0
done
table without7 k8 without2
