#!/usr/bin/env bash
# Every row of DDM's ImageNet experiments. README.md has the protocol, the costs and the published numbers.
#     SOURCE=/data/imagenet/train REFERENCE=VIRTUAL_imagenet256_labeled.npz bash recipes/imagenet/run.sh
#     ON="slurm --wait" ... bash recipes/imagenet/run.sh curve              # one of: curve strategies counts student
# You can interrupt it; running it again resumes. Networks are prolonged from one point of the curve to the next.
set -euo pipefail
source recipes/common/lib.sh
SOURCE=${SOURCE:?the folder, tar files or parquet files of the training images, with labels}
REFERENCE=${REFERENCE:-train} # statistics of others, or the training images
ROOT=${ROOT_IMAGENET:-runs/imagenet}
ON=${ON:-local}                     # options of `atoll launch --on`
POINTS=${POINTS:-"100 200 300 400 500 600 700 800"} # of the curve, in UNIT steps
UNIT=${UNIT:-1000}
MIDDLE=${MIDDLE:-400}               # the point of all comparisons but the curve
BATCH=${BATCH:-256}                 # of all experts together
IMAGES=${IMAGES:-50000}
SETTINGS=${SETTINGS:-}              # further options of every `atoll init`
EVALUATION=${EVALUATION:-}          # further options of every `atoll evaluate`

make_run() { # make_run NAME K [OPTION...]: a run with K experts, and the images, features and latents of the first one
    local run=$ROOT/$1 count=$2; shift 2
    [ -f "$run/atoll.yaml" ] || $atoll init "$run" --preset imagenet256 --data.source "$SOURCE" --clusters.count "$count" \
        --train.batch_size $((BATCH / count)) --monolith.batch_size "$BATCH" --monolith.ema.ema $((221792 * 8)) $SETTINGS "$@"
    for part in ingest features latents; do link "$ROOT/k8/data/$part" "$run/data/$part"; done
}

until_step() { # until_step NAME K POINT JOB...: train the jobs of a run up to this point
    local run=$ROOT/$1 count=$2 steps=$(($3 * UNIT)); shift 3
    # The router belongs to the data and is finished at the first point.
    $atoll launch "$run" --on $ON --jobs prepare "$@" \
        --train.total_images $((steps * BATCH / count)) --monolith.total_images $((steps * BATCH))
}

measure() { # measure NAME OPTION...: FID, KID, precision and recall
    local run=$ROOT/$1; shift
    $atoll evaluate "$run" --num-images "$IMAGES" --reference "$REFERENCE" --prompts train --steps 50 --guidance-scale 1 \
        --without diversity trajectories diagnostics $EVALUATION "$@"
    cp "$run/evaluation/latest.json" "$run/evaluation/$(date +%s).json"
}

curve() { # FID over steps of the monolith and of eight experts; at MIDDLE, all strategies
    make_run k8 8
    for point in $POINTS; do
        until_step k8 8 "$point" experts router monolith
        measure k8 --models experts monolith --routings top-1
        [ "$point" != "$MIDDLE" ] || strategies
    done
}

strategies() { # the table of inference strategies; `sample-1` draws an expert at every step
    measure k8 --models experts monolith --routings top-1 top-2 full sample-1 oracle nearest
}

counts() { # 4 and 16 experts, and eight experts on a random partition
    make_run k4 4
    make_run k16 16
    make_run random8 8 --clusters.method random
    for name in k4 k16 random8; do
        local count=${name//[!0-9]/}
        until_step $name "$count" "$MIDDLE" experts router
        measure $name --models experts --routings top-1
    done
}

student() { # the student: as many steps as the monolith, a quarter of its batch, the teacher of the image's cluster
    local last=${POINTS##* }
    $atoll launch "$ROOT/k8" --on $ON --jobs student --student.total_images $((last * UNIT * BATCH / 4))
    measure k8 --models student
}

if [ $# -eq 0 ]; then set -- curve counts student; fi
for part in "$@"; do $part; done
