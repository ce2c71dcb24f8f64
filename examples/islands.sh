#!/usr/bin/env bash
# Two isolated experts on two clusters of emoji: prepare, train each from its own shards, draw samples. Resumable.
#
#     bash examples/islands.sh [RUN]
set -euo pipefail
run=${1:-runs/demo}
atoll=${ATOLL:-atoll}

step() { printf '\n== %s\n' "$*"; }

step "1 of 4: settings"
if [ ! -f "$run/atoll.yaml" ]; then
    $atoll init "$run" --preset emoji \
        --data.source 'emoji:categories=smileys-emotion,food-drink;skin-tones=no' \
        --clusters.count 2 --experts.1 ddpm \
        --networks.default '{name: DiT-XS/2, width: 192, depth: 6, heads: 3}' \
        --train.samples 12800 --train.batch 32 --train.lr 1e-3 --train.warmup 1600 --train.ema.ema 1500 \
        --train.save_every 3200 --train.log_every 800 --train.grid_every 6400
fi
step "2 of 4: pictures into two clusters' shards"
$atoll prepare "$run"
for expert in 0 1; do
    step "$((expert + 3)) of 4: expert $expert, from its own cluster's shards alone"
    $atoll train "$run" --expert $expert
done
printf '\nlook at:\n'
ls "$run"/data/clusters/cluster_*.png "$run"/experts/*/grids/*.png
printf 'next: %s train %s --router; the settings are in %s/atoll.yaml\n' "$atoll" "$run" "$run"
