#!/usr/bin/env bash
# Compare DDM with the monolith at equal FLOPs on CIFAR-10, with the settings that pay in recipes/fast: K = 8 and 4.
#     SEED=0 bash recipes/ddm-vs-monolith/cifar10.sh
# A control has the monolith with an expert's batch size. Another arm starts all experts from one dense network, which takes
# a quarter of their FLOPs, and also measures the average of these experts. CORE=1 leaves out K = 4 and the control, for
# further seeds. Muon is not used: a batch of 8 images has too few tokens for Newton-Schulz to pay.
set -euo pipefail
export DATASET=cifar10 STEPS=${STEPS:-800} TOTAL=${TOTAL:-64} LR=${LR:-8.0e-3}
export NETWORK=${NETWORK:-'{name: ModernDiT-XS/4, width: 96, depth: 4, heads: 3}'}
source recipes/common/lib.sh
options="--without diversity trajectories"
prepare
make_arm k8 8 features
train k8 --jobs monolith experts router
evaluate k8 --models monolith experts --routings top-1 nearest oracle $options
make_arm shared 8 features
link "$(arm k8)/router" "$(arm shared)/router"
train shared --jobs experts --shared_start.flops_share 0.25
[ -d "$(arm shared)/merged" ] || $atoll merge "$(arm shared)"
evaluate shared --models experts merged --routings top-1 oracle $options
[ -z "${CORE:-}" ] || exit 0
make_arm k4 4 features
train k4 --jobs experts router
evaluate k4 --models experts --routings top-1 oracle $options
make_arm small-batch 8 features
train small-batch --jobs monolith --monolith.batch_size $((TOTAL / 8))
evaluate small-batch --models monolith $options
table k8 shared k4 small-batch
