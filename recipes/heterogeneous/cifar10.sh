#!/usr/bin/env bash
# Mix DDPM and flow-matching experts on CIFAR-10: two DDPM and six flow-matching experts, from scratch and from a converted
# DDPM checkpoint, each against eight flow-matching experts with the same start.
#     SEED=0 bash recipes/heterogeneous/cifar10.sh
# Run ddm-vs-monolith/cifar10.sh first: it trains the flow-matching experts and the router. The checkpoint is a
# class-conditional AdaLN-Zero DiT, trained with DDPM on cluster 4 alone. Its layout has no modern block, so all experts
# that start from it are DiTs of the papers.
set -euo pipefail
export DATASET=cifar10 STEPS=${STEPS:-800} TOTAL=${TOTAL:-64} LR=${LR:-8.0e-3}
modern='{name: ModernDiT-XS/4, width: 96, depth: 4, heads: 3}'
export NETWORK=$modern
source recipes/common/lib.sh
mixed="{default: flow-matching, 0: ddpm, 3: ddpm}"
make_arm ddpm2 8 features "$mixed"
reuse k8 ddpm2 1 2 4 5 6 7
train ddpm2 --jobs experts --experts 0 3

NETWORK=${modern/Modern/} LR=4.0e-3
make_arm pretrained 8 features "{default: ddpm}"
images=$((STEPS * TOTAL / 4))
train pretrained --jobs experts --experts 4 --networks.default.modulation zero --train.batch_size 32 \
    --train.total_images $images --train.warmup_images $((images / 20)) --train.ema.ema $((images / 40))
checkpoint=$(arm pretrained)/experts/004/final
for final in new keep; do
    time=$([ $final = new ] && echo steps || echo same)
    [ -f "$(arm pretrained)/$final/conversion.json" ] || $atoll convert "$checkpoint" "$(arm pretrained)/$final" \
        --to flow-matching --final $final --time "$time" --text-width 0 --keep-labels --force
done
make_arm pretrained8 8 features
make_arm pretrained-ddpm2 8 features "$mixed"
link "$(arm k8)/router" "$(arm pretrained8)/router"
train pretrained8 --jobs experts --train.init_from "$(arm pretrained)/new"
train pretrained-ddpm2 --jobs experts --experts 0 3 --train.init_from "$(arm pretrained)/keep"
reuse pretrained8 pretrained-ddpm2 1 2 4 5 6 7
for name in k8 ddpm2 pretrained8 pretrained-ddpm2; do
    evaluate $name --models experts --routings top-1 --without trajectories --diversity 32 8
done
table k8 ddpm2 pretrained8 pretrained-ddpm2
