#!/usr/bin/env bash
# The same experts and monolith, trained two and a half times as long.  SEED=0 bash recipes/ddm-vs-monolith/longer.sh
set -euo pipefail
export STEPS=${STEPS:-4000}
source recipes/common/lib.sh
prepare
make_arm long8 8 features
train long8 --jobs monolith experts router
few="--extractors inception efficientnet-lite0 --skip diversity trajectories"
measure long8 --models monolith experts --routings top-1 top-2 drawn oracle nearest $few
recipe=held-out measure long8 --models monolith experts --routings top-1 top-2 drawn oracle nearest --reference held-out $few diagnostics
make_arm long-small-batch 8 features
train long-small-batch --jobs monolith --monolith.batch $((TOTAL / 8))
measure long-small-batch --models monolith $few
table k8 long8 long-small-batch
echo "against held-out pictures:"
recipe=held-out table k8 long8
