#!/usr/bin/env bash
# Train two DDPM experts among six of flow matching two and a half times as long.
#     SEED=0 bash recipes/heterogeneous/longer.sh
# Run ddm-vs-monolith/longer.sh first: it trains the flow-matching experts and the router.
set -euo pipefail
export STEPS=${STEPS:-4000}
source recipes/common/lib.sh
make_arm long-ddpm2 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
train long-ddpm2 --jobs experts --experts 0 3
reuse long8 long-ddpm2 1 2 4 5 6 7
for name in long8 long-ddpm2; do
    evaluate $name --models experts --routings top-1 top-2 --extractors inception efficientnet-lite0 --diversity 64 8
done
table long8 long-ddpm2
