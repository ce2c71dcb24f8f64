#!/usr/bin/env bash
# Train and evaluate the same experts and monolith two and a half times as long.
#     SEED=0 bash recipes/ddm-vs-monolith/longer.sh
set -euo pipefail
export STEPS=${STEPS:-4000}
source recipes/common/lib.sh
prepare
make_arm long8 8 features
train long8 --jobs monolith experts router
options="--extractors inception efficientnet-lite0 --without diversity trajectories"
evaluate long8 --models monolith experts --routings top-1 top-2 drawn oracle nearest $options
recipe=validation evaluate long8 --models monolith experts --routings top-1 top-2 drawn oracle nearest --reference validation $options diagnostics
make_arm long-small-batch 8 features
train long-small-batch --jobs monolith --monolith.batch_size $((TOTAL / 8))
evaluate long-small-batch --models monolith $options
table k8 long8 long-small-batch
echo "against validation images:"
recipe=validation table k8 long8
