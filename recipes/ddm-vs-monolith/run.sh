#!/usr/bin/env bash
# Compare DDM with the monolith at equal FLOPs: K = 8, 4, 2 by features, K = 8 at random, all routings.
#     SEED=0 bash recipes/ddm-vs-monolith/run.sh
# Controls: a monolith with an expert's batch size and eight times the steps, one with twice the learning rate, and an
# unconditioned router. CORE=1 runs only the first arm, for further seeds.
set -euo pipefail
source recipes/common/lib.sh
options="--extractors inception efficientnet-lite0 --without diversity trajectories"
prepare
make_arm k8 8 features
train k8 --jobs monolith experts router
if [ -n "${CORE:-}" ]; then
    evaluate k8 --models monolith experts --routings top-1 top-2 oracle nearest $options
    exit
fi
routings="top-1 top-2 oracle nearest full threshold-0.2"
evaluate k8 --models monolith experts --routings $routings --extractors inception efficientnet-lite0 --diversity 64 8
recipe=validation evaluate k8 --models monolith experts --routings $routings --reference validation $options diagnostics
for count in 4 2; do
    make_arm k$count $count features
    train k$count --jobs experts router
    evaluate k$count --models experts --routings top-1 top-2 oracle $options
done
make_arm random8 8 random
train random8 --jobs experts router
evaluate random8 --models experts --routings top-1 oracle full $options
ROUTER_CONDITIONING=none make_arm unconditioned 8 features
train unconditioned --jobs router
reuse k8 unconditioned 0 1 2 3 4 5 6 7
evaluate unconditioned --models experts --routings top-1 top-2 $options
make_arm small-batch 8 features
train small-batch --jobs monolith --monolith.batch_size $((TOTAL / 8))
evaluate small-batch --models monolith $options
LR=8.0e-3 make_arm monolith-lr8 8 features
train monolith-lr8 --jobs monolith
evaluate monolith-lr8 --models monolith $options
table k8 k4 k2 random8 unconditioned small-batch monolith-lr8
echo "against validation images:"
recipe=validation table k8
