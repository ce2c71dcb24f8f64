#!/usr/bin/env bash
# Train and measure the demo with other seeds, on the prepared data of a finished run of `atoll demo`:
#     bash recipes/demo/seeds.sh RUN [SEED...]
# The run of seed S is RUN-seedS. Seed 0 is RUN itself, and is only measured.
set -euo pipefail
atoll=${ATOLL:-.venv/bin/atoll}
python=${ATOLL_PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run=$1
shift
if [ $# -eq 0 ]; then set -- 0 1 2; fi

share() { # share FOLDER: copy a folder of RUN to the run of this seed by hard links, completely or not at all
    [ -d "$run/$1" ] && [ ! -d "$other/$1" ] || return 0
    mkdir -p "$(dirname "$other/$1")"
    cp -al "$run/$1" "$other/$1.part"
    mv "$other/$1.part" "$other/$1"
}

for seed in "$@"; do
    other=$run
    if [ "$seed" != 0 ]; then
        other=$run-seed$seed
        share data
        share evaluation/reference # features of the real images
        sed "/^train:/,/^[a-z]/ s/^  seed: 0/  seed: $seed/" "$run/atoll.yaml" > "$other/atoll.yaml"
        $atoll launch "$other" --jobs experts router monolith --max-parallel "${JOBS:-2}" --island.cores 1
    fi
    $python recipes/demo/prompts.py "$other" --sheet "$other/prompts.png" | tee "$other/prompts.md"
    $atoll evaluate "$other" --models experts monolith --routings top-1 --steps 25 --guidance-scale 1 --prompts train \
        --num-images 1024 --allow-small --without diversity trajectories diagnostics
done
