#!/usr/bin/env bash
# Guidance on the demo: train its experts with weak networks, then compare kinds and scales of guidance.
#     bash recipes/guidance/run.sh runs/weak
set -euo pipefail
run=${1:-runs/weak}
[ -f "$run/atoll.yaml" ] || .venv/bin/atoll init "$run" --preset demo --train.weak_share 0.2
.venv/bin/atoll prepare "$run"
.venv/bin/atoll launch "$run" --jobs experts router
measure() {
    .venv/bin/atoll evaluate "$run" --models experts --routings top-1 --prompts train --steps 25 --num-images "${IMAGES:-128}" \
        --extractors efficientnet-lite0 --allow-small --without diversity trajectories diagnostics "$@"
}
measure --guidance-scale 1
for scale in 1.5 2 3; do
    measure --guidance-scale $scale
    measure --guidance-scale $scale --guidance autoguidance
done
for scale in 2 3; do
    measure --guidance-scale $scale --guidance-interval 0.2 0.7
    measure --guidance-scale $scale --guidance-interval 0.2 0.7 --guidance autoguidance
done
measure --guidance-scale 3 --rescale 0.7
.venv/bin/python recipes/guidance/errors.py "$run" --images recipes/guidance/images.png
