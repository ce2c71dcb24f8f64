#!/usr/bin/env bash
# Validation velocity error of four bridges, for the two DDPM experts trained two and a half times as long.
#     SEED=0 bash recipes/bridge/longer.sh
# Run heterogeneous/longer.sh first: it trains the experts.
set -euo pipefail
export STEPS=${STEPS:-4000}
source recipes/common/lib.sh
for bridge in exact published-linear published-schedule; do
    make_arm long-ddpm2-$bridge 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
    reuse long8 long-ddpm2-$bridge 1 2 4 5 6 7
    for expert in 0 3; do
        ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/set_bridge.py \
            "$(arm long-ddpm2)" "$(arm long-ddpm2-$bridge)" $expert $bridge
    done
done
for name in long-ddpm2 long-ddpm2-exact long-ddpm2-published-linear long-ddpm2-published-schedule; do
    evaluate $name --models experts --routings top-1 --without metrics diversity trajectories
    ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/errors.py "$(arm $name)" 0 3
done
