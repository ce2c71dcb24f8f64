#!/usr/bin/env bash
# DDM's distillation, literally: equal steps, a quarter of the monolith's batch, a third of its FLOPs.
#     SEED=0 bash recipes/student/run.sh
# Run ddm-vs-monolith/run.sh first: it trains the experts, the router and the network from scratch (the monolith).
# You can interrupt it; running it again resumes. The arms differ in what the student begins with and what it is told:
#     ddm        random weights, as published
#     begun      the weights of expert 0
#     told       random weights, and the cluster of each image
#     begun-told both
# ARMS chooses some of them, and EXTRACTORS the feature networks of the evaluation.
set -euo pipefail
source recipes/common/lib.sh
batch=$((TOTAL / 4))
images=$((STEPS * batch)) # as many steps as the monolith
student=(--student.batch_size $batch --student.total_images $images --student.block 6400)
# What a student has in common with the monolith follows the images: warmup, EMA and checkpoints.
student+=(--train.warmup_images $((images / 20)) --train.ema.ema $((images / 40)) --train.save_every $((images / 4)))

begun=(--student.init_from expert:0)
told=(--student.cluster true)
read -ra arms <<< "${ARMS:-ddm begun told begun-told}"
read -ra extractors <<< "${EXTRACTORS:-inception efficientnet-lite0}"
for name in "${arms[@]}"; do
    options=()
    [[ $name != *begun* ]] || options+=("${begun[@]}")
    [[ $name != *told* ]] || options+=("${told[@]}")
    own=student-$name
    link "$(arm k8)/data" "$(arm "$own")/data"
    cp "$(arm k8)/atoll.yaml" "$(arm "$own")/atoll.yaml"
    reuse k8 "$own" 0 1 2 3 4 5 6 7
    link "$(arm k8)/monolith" "$(arm "$own")/monolith"
    train "$own" --jobs student "${student[@]}" "${options[@]}"
    evaluate "$own" --models student monolith experts --routings top-1 --extractors "${extractors[@]}"
done
table "${arms[@]/#/student-}"
