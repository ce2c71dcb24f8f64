#!/usr/bin/env bash
# Train and measure the demo with other seeds, on the prepared data of a finished run of `atoll demo`:
#     bash recipes/demo/seeds.sh RUN [SEED...]
# The run of seed S is RUN-seedS. Seed 0 is RUN itself, and is only measured.
set -euo pipefail
source recipes/common/lib.sh
run=$1
shift
if [ $# -eq 0 ]; then set -- 0 1 2; fi
for seed in "$@"; do
    other=$run
    if [ "$seed" != 0 ]; then
        other=$run-seed$seed
        link "$run/data" "$other/data"
        link "$run/evaluation/reference" "$other/evaluation/reference" # features of the real images
        sed "/^train:/,/^[a-z]/ s/^  seed: 0/  seed: $seed/" "$run/atoll.yaml" > "$other/atoll.yaml"
        $atoll launch "$other" --jobs experts router monolith --max-parallel "$JOBS" --island.cores 1
    fi
    $python recipes/demo/prompts.py "$other" --sheet "$other/prompts.png" | tee "$other/prompts.md"
    $atoll evaluate "$other" --models experts monolith --routings top-1 --steps 25 --guidance-scale 1 --prompts train \
        --num-images 1024 --allow-small --without diversity trajectories diagnostics
done
