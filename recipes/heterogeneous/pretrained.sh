#!/usr/bin/env bash
# Start every expert from one pretrained DDPM checkpoint, as HDDM does. The DDPM experts also keep its final layer and its
# timesteps.
#     SEED=0 bash recipes/heterogeneous/pretrained.sh
# Run converted-start/run.sh (the checkpoint) and ddm-vs-monolith/run.sh (the router) first.
set -euo pipefail
source recipes/common/lib.sh
checkpoint=$(arm pretrained)/experts/004/final
converted=$(arm pretrained)/converted
native=$(arm pretrained)/native
[ -f "$native/conversion.json" ] ||
    $atoll convert "$checkpoint" "$native" --to flow-matching --final keep --time same --text-width 384 --force
make_arm pretrained8 8 features
make_arm pretrained-ddpm2 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
link "$(arm k8)/router" "$(arm pretrained8)/router"
train pretrained8 --jobs experts --train.init_from "$converted"
train pretrained-ddpm2 --jobs experts --experts 0 3 --train.init_from "$native"
reuse pretrained8 pretrained-ddpm2 1 2 4 5 6 7
for name in pretrained8 pretrained-ddpm2; do
    evaluate $name --models experts --routings top-1 top-2 --extractors inception efficientnet-lite0 --diversity 64 8
done
table pretrained8 pretrained-ddpm2
