#!/usr/bin/env bash
# Distill few-step students of the demo's experts, and compare them with the experts' own few steps.
#     STEPS=4 bash recipes/student/few-steps.sh [RUN]
# Run make demo first. You can interrupt the script; running it again resumes. Results go to a copy of the run.
set -euo pipefail
source=${1:-runs/demo}
steps=${STEPS:-4}
images=${IMAGES:-1600}
atoll=${ATOLL:-.venv/bin/atoll}
run=$source-$steps-steps
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -d "$run" ] || { rm -rf "$run.part"; cp -al "$source" "$run.part"; rm -rf "$run.part/leases"; mv "$run.part" "$run"; }
for expert in 0 1 2 3 4; do
    $atoll train "$run" --student --expert $expert --student.steps "$steps" --student.total_images "$images" \
        --student.batch_size 16 --student.lr 3e-4 --train.log_every 400
done
$atoll evaluate "$run" --models students experts --routings top-1 drawn oracle --steps "$steps" --guidance-scale 1 --prompts train \
    --num-images "${NUM_IMAGES:-256}" --without diversity trajectories diagnostics --allow-small
