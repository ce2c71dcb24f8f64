#!/usr/bin/env bash
# Compare four bridges for the same DDPM experts: exact, calibrated (the default), and two readings of the published conversion.
#     SEED=0 bash recipes/bridge/run.sh
# Run heterogeneous/run.sh first: it trains the experts.
set -euo pipefail
source recipes/common/lib.sh
for bridge in exact published-linear published-schedule; do
    make_arm ddpm4-$bridge 8 features "{default: flow-matching, 0: ddpm, 3: ddpm, 1: ddpm, 5: ddpm}"
    reuse k8 ddpm4-$bridge 2 4 6 7
    for expert in 0 1 3 5; do
        ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/set_bridge.py "$(arm ddpm4)" "$(arm ddpm4-$bridge)" $expert $bridge
    done
done
for name in ddpm4 ddpm4-exact ddpm4-published-linear ddpm4-published-schedule; do
    evaluate $name --models experts expert:0 --routings top-1 --extractors inception efficientnet-lite0 --without diversity
done
table ddpm4 ddpm4-exact ddpm4-published-linear ddpm4-published-schedule
for name in ddpm4 ddpm4-exact ddpm4-published-linear ddpm4-published-schedule; do
    ${ATOLL_PYTHON:-.venv/bin/python} recipes/bridge/errors.py "$(arm $name)" 0 1 3 5
done
