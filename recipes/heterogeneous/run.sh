#!/usr/bin/env bash
# Compare eight flow-matching experts with mixtures that include DDPM, x0 and v-prediction experts.
#     SEED=0 bash recipes/heterogeneous/run.sh
# Run ddm-vs-monolith/run.sh first: it trains the flow-matching experts and the router.
set -euo pipefail
source recipes/common/lib.sh
make_arm ddpm4 8 features "{default: flow-matching, 0: ddpm, 3: ddpm, 1: ddpm, 5: ddpm}"
reuse k8 ddpm4 2 4 6 7
train ddpm4 --jobs experts --experts 0 3 1 5
make_arm ddpm2 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
reuse ddpm4 ddpm2 0 3
reuse k8 ddpm2 1 2 4 5 6 7
make_arm x02 8 features "{default: flow-matching, 0: x0, 3: x0}"
reuse k8 x02 1 2 4 5 6 7
train x02 --jobs experts --experts 0 3
make_arm v2 8 features "{default: flow-matching, 0: v-prediction, 3: v-prediction}"
reuse k8 v2 1 2 4 5 6 7
train v2 --jobs experts --experts 0 3
for name in k8 ddpm2 ddpm4 x02 v2; do
    evaluate $name --models experts --routings top-1 top-2 --extractors inception efficientnet-lite0 --diversity 64 8
done
table k8 ddpm2 ddpm4 x02 v2
