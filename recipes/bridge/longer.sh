#!/usr/bin/env bash
# The held-out velocity error over the four bridges, of the two DDPM experts that were trained two and a half times as long.
# The experts are those of heterogeneous/longer.sh: run it first.  SEED=0 bash recipes/bridge/longer.sh
set -euo pipefail
export STEPS=${STEPS:-4000}
source recipes/common/lib.sh
for bridge in exact published-linear published-schedule; do
    make_arm long-ddpm2-$bridge 8 features "{default: flow-matching, 0: ddpm, 3: ddpm}"
    take long8 long-ddpm2-$bridge 1 2 4 5 6 7
    for expert in 0 3; do
        ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/redeclare.py \
            "$(arm long-ddpm2)" "$(arm long-ddpm2-$bridge)" $expert $bridge
    done
done
for name in long-ddpm2 long-ddpm2-exact long-ddpm2-published-linear long-ddpm2-published-schedule; do
    measure $name --models experts --routings top-1 --skip metrics diversity trajectories
    ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/errors.py "$(arm $name)" 0 3
done
