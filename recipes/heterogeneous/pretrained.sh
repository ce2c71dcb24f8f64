#!/usr/bin/env bash
# The same mixture as HDDM starts it: every expert from one pretrained DDPM checkpoint, of which the DDPM experts also keep the
# final layer and the clock.  SEED=0 bash recipes/heterogeneous/pretrained.sh
# The checkpoint is that of converted-start, the router that of ddm-vs-monolith: run both first.
set -euo pipefail
source recipes/common/lib.sh
checkpoint=$(arm pretrained)/experts/004/final
converted=$(arm pretrained)/converted
native=$(arm pretrained)/native
[ -f "$native/conversion.json" ] ||
    $atoll convert "$checkpoint" "$native" --to flow-matching --final keep --time same --text-width 384 --force
make_arm started8 8 features
make_arm started-ddpm2 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
link "$(arm k8)/router" "$(arm started8)/router"
train started8 --jobs experts --train.init_from "$converted"
train started-ddpm2 --jobs experts --experts 0 3 --train.init_from "$native"
take started8 started-ddpm2 1 2 4 5 6 7
for name in started8 started-ddpm2; do
    measure $name --models experts --routings top-1 top-2 --extractors inception efficientnet-lite0 --diversity 64 8
done
table started8 started-ddpm2
