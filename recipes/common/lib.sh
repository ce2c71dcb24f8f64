# Functions of the recipes. Source this file from the root of the repository.
#
# DATASET is emoji (built in, latents, captions) or cifar10 (fetched with npm, pixels, class labels).
# An arm is one variant of an experiment: the run ROOT/seedS/NAME. Arms share ingest, features, latents and text, and reuse
# each other's finished experts by hard links: an expert depends only on its cluster and settings.
# As in the DDM paper the total batch size is divided among the experts and everything else is equal, so every arm spends the
# FLOPs of the monolith: STEPS steps of TOTAL images.
atoll=${ATOLL:-.venv/bin/atoll}
python=${ATOLL_PYTHON:-.venv/bin/python}
DATASET=${DATASET:-emoji}
ROOT=${ROOT:-runs/$DATASET-recipes}
SEED=${SEED:-0}
STEPS=${STEPS:-1600}
TOTAL=${TOTAL:-256}
# Emoji have 16 tokens (latents of 8 x 8 with patch 2), CIFAR-10 has 64 (pixels of 32 x 32 with patch 4).
case $DATASET in
emoji) NETWORK=${NETWORK:-'{name: DiT-XS/2, width: 96, depth: 4, heads: 3}'} ;;
cifar10) NETWORK=${NETWORK:-'{name: DiT-XS/4, width: 128, depth: 4, heads: 4}'} ;;
*) echo "unknown DATASET $DATASET; expected emoji or cifar10" >&2; exit 1 ;;
esac
ROUTER_CONDITIONING=${ROUTER_CONDITIONING:-auto} # input of the router besides the noisy image: the caption or the label
JOBS=${JOBS:-2} # jobs at a time, one thread each
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
here=recipes/common
recipe=${RECIPE:-$(basename "$(dirname "$0")")}

arm() { echo "$ROOT/seed$SEED/$1"; }

link() { # link FROM TO: copy a folder by hard links, completely or not at all; do nothing without FROM or with TO
    [ -d "$1" ] && [ ! -d "$2" ] || return 0 # CIFAR-10 has no text
    rm -rf "$2.part"
    mkdir -p "$(dirname "$2")"
    cp -al "$1" "$2.part"
    mv "$2.part" "$2"
}

dataset_settings() { # dataset_settings: print the settings of the dataset
    sed "s|SOURCE|$ROOT/cifar10/train.parquet|" $here/$DATASET.yaml
}

settings() { # settings SECTION BATCH_SIZE IMAGES: print what depends on the size of a job, for `train` or `monolith`
    # Warm up for the first 5 % of the images; the half-life of the EMA is 2.5 % of them.
    cat <<YAML
$1:
  total_images: $3
  batch_size: $2
  warmup_images: $(($3 / 20))
  ema: {ema: $(($3 / 40))}
  save_every: $(($3 / 4))
  log_every: $(($3 / 40))
YAML
}

prepare() { # prepare: the data that all arms share
    mkdir -p "$ROOT/base"
    [ $DATASET != cifar10 ] || $python $here/cifar10.py "$ROOT/cifar10"
    { dataset_settings; echo "clusters: {count: 8}"; } > "$ROOT/base/atoll.yaml"
    $atoll prepare "$ROOT/base"
}

partition() { # partition K METHOD: the data in K clusters, for all arms with this partition
    local run=$ROOT/$2$1
    mkdir -p "$run"
    for part in ingest features latents text; do link "$ROOT/base/data/$part" "$run/data/$part"; done
    { dataset_settings; echo "clusters: {count: $1, method: $2}"; } > "$run/atoll.yaml"
    $atoll prepare "$run"
}

write_settings() { # write_settings FILE: write stdin to FILE once; refuse other settings later, because finished networks depend on them
    local new copy; new=$(cat); copy=$(dirname "$1")/recipe.yaml # of FILE, to which the first launch adds its options
    if [ -f "$copy" ] && [ "$new" != "$(cat "$copy")" ]; then
        echo "$1 has other settings; remove its folder, or choose another ROOT" >&2
        return 1
    fi
    [ -f "$copy" ] || echo "$new" > "$1"
    echo "$new" > "$copy"
}

make_arm() { # make_arm NAME K METHOD [EXPERTS]: a prepared run with K clusters
    local run; run=$(arm "$1")
    local images=$((STEPS * TOTAL / $2))
    mkdir -p "$run"
    if [ ! -d "$run/data" ]; then
        partition "$2" "$3"
        link "$ROOT/$3$2/data" "$run/data"
    fi
    {
        dataset_settings
        echo "networks: {default: $NETWORK}"
        echo "router: {network: $NETWORK, conditioning: $ROUTER_CONDITIONING, total_images: $((STEPS * TOTAL / 8)), batch_size: 64, lr: 1.0e-3}"
        echo "clusters: {count: $2, method: $3}"
        echo "experts: ${4:-{default: flow-matching\}}"
        settings monolith $TOTAL $((STEPS * TOTAL)) # the images of all experts together
        settings train $((TOTAL / $2)) $images
        printf '  %s\n' "lr: ${LR:-4.0e-3}" "lr_schedule: ${LR_SCHEDULE:-cosine}" "seed: $SEED" "sample_every: $images"
    } | write_settings "$run/atoll.yaml"
    $atoll config "$run" > /dev/null
}

reuse() { # reuse FROM TO EXPERT...: link finished experts of one arm into another, and the router unless it has one
    local from to job; from=$(arm "$1"); to=$(arm "$2"); shift 2
    for job in $(printf 'experts/%03d ' "$@"); do
        [ -f "$from/$job/final/manifest.json" ] || { echo "$from/$job is not finished" >&2; return 1; }
        link "$from/$job" "$to/$job"
    done
    [ ! -f "$from/router/final/manifest.json" ] || link "$from/router" "$to/router"
}

train() { # train NAME OPTION...: train the missing jobs of an arm, JOBS at a time, with options of atoll launch
    local run; run=$(arm "$1"); shift
    $atoll launch "$run" --max-parallel "$JOBS" --island.cores "$OMP_NUM_THREADS" "$@"
}

evaluate() { # evaluate NAME OPTION...: metrics of an arm; the features of the real images are computed once for all arms
    local run; run=$(arm "$1"); shift
    mkdir -p "$ROOT/base/reference"
    link "$ROOT/base/reference" "$run/evaluation/reference"
    $atoll evaluate "$run" --num-images "${NUM_IMAGES:-512}" --num-real 2048 --steps 25 --guidance-scale 2 --num-val 256 \
        --num-trajectories 16 --allow-small "$@"
    cp "$run/evaluation/latest.json" "$run/evaluation/$recipe.json"
    for set in "$run"/evaluation/reference/*; do link "$set" "$ROOT/base/reference/$(basename "$set")"; done
}

table() { # table NAME...: the metrics of these arms, over all evaluated seeds
    $python $here/table.py "$ROOT" "$recipe" "$@"
}
