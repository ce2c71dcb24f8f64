# Functions of the emoji recipes; source it from the repository's root.
#
# An arm is a run: ROOT/seedS/NAME. Arms share ingest, features, latents and text, and take over finished experts of each
# other by hard links: an expert depends on its own cluster and settings alone, so it need not be trained twice.
# As in the DDM paper the total batch is divided among the experts, everything else is the same, so every arm spends the FLOPs
# of the monolith: STEPS steps of TOTAL samples.
atoll=${ATOLL:-.venv/bin/atoll}
ROOT=${ROOT:-runs/emoji-recipes}
SEED=${SEED:-0}
STEPS=${STEPS:-1600}
TOTAL=${TOTAL:-256}
NETWORK=${NETWORK:-'{name: DiT-XS/2, width: 96, depth: 4, heads: 3}'}
TOLD=${TOLD:-pooled} # what the router sees besides the noisy latent
JOBS=${JOBS:-2} # jobs at a time, one thread each
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
here=recipes/common
recipe=${RECIPE:-$(basename "$(dirname "$0")")}

arm() { echo "$ROOT/seed$SEED/$1"; }

link() { # link FROM TO: a folder by hard links, whole or not at all
    [ ! -d "$2" ] || return 0
    rm -rf "$2.part"
    mkdir -p "$(dirname "$2")"
    cp -al "$1" "$2.part"
    mv "$2.part" "$2"
}

settings() { # settings SECTION BATCH SAMPLES: what depends on the size of a job, for `train` or `monolith`
    cat <<YAML
$1:
  samples: $3
  batch: $2
  warmup: $(($3 / 20))
  ema: {ema: $(($3 / 40))}
  save_every: $(($3 / 4))
  log_every: $(($3 / 40))
YAML
}

prepare() { # prepare: the data that all arms share
    mkdir -p "$ROOT/base"
    { cat $here/atoll.yaml; echo "clusters: {count: 8}"; } > "$ROOT/base/atoll.yaml"
    $atoll prepare "$ROOT/base"
}

partition() { # partition K METHOD: the data in K clusters, for all arms that have these
    local run=$ROOT/$2$1
    mkdir -p "$run"
    for part in ingest features latents text; do link "$ROOT/base/data/$part" "$run/data/$part"; done
    { cat $here/atoll.yaml; echo "clusters: {count: $1, method: $2}"; } > "$run/atoll.yaml"
    $atoll prepare "$run"
}

keep() { # keep FILE: write the settings given to it; finished networks belong to them, so others are refused
    local new; new=$(cat)
    if [ -f "$1" ] && [ "$new" != "$(cat "$1")" ]; then
        echo "$1 has other settings; remove its folder, or choose another ROOT" >&2
        return 1
    fi
    echo "$new" > "$1"
}

make_arm() { # make_arm NAME K METHOD [EXPERTS]: a prepared run with K clusters
    local run; run=$(arm "$1")
    local samples=$((STEPS * TOTAL / $2))
    mkdir -p "$run"
    if [ ! -d "$run/data" ]; then
        partition "$2" "$3"
        link "$ROOT/$3$2/data" "$run/data"
    fi
    {
        cat $here/atoll.yaml
        echo "networks: {default: $NETWORK}"
        echo "router: {network: $NETWORK, told: $TOLD, samples: $((STEPS * TOTAL / 8)), batch: 64, lr: 1.0e-3}"
        echo "clusters: {count: $2, method: $3}"
        echo "experts: ${4:-{default: flow-matching\}}"
        settings monolith $TOTAL $((STEPS * TOTAL)) # the samples of all experts together
        settings train $((TOTAL / $2)) $samples
        printf '  %s\n' "lr: ${LR:-4.0e-3}" "decay: ${DECAY:-cosine}" "seed: $SEED" "grid_every: $samples"
    } | keep "$run/atoll.yaml"
    $atoll config "$run" > /dev/null
}

take() { # take FROM TO EXPERT...: finished experts of one arm as experts of another, and its router unless it has one
    local from to job; from=$(arm "$1"); to=$(arm "$2"); shift 2
    for job in $(printf 'experts/%03d ' "$@"); do
        [ -f "$from/$job/final/manifest.json" ] || { echo "$from/$job is not finished" >&2; return 1; }
        link "$from/$job" "$to/$job"
    done
    [ ! -f "$from/router/final/manifest.json" ] || link "$from/router" "$to/router"
}

train() { # train NAME OPTION...: the missing jobs of an arm, JOBS at a time; options of atoll launch choose and change them
    local run; run=$(arm "$1"); shift
    $atoll launch "$run" --at-once "$JOBS" --island.cores "$OMP_NUM_THREADS" "$@"
}

measure() { # measure NAME OPTION...: figures of an arm; the features of the real pictures are computed once for all arms
    local run; run=$(arm "$1"); shift
    mkdir -p "$ROOT/base/reference"
    link "$ROOT/base/reference" "$run/evaluation/reference"
    $atoll evaluate "$run" --samples "${SAMPLES:-512}" --references 2048 --steps 25 --guidance 2 --held-out 256 \
        --followed 16 --allow-few "$@"
    cp "$run/evaluation/latest.json" "$run/evaluation/$recipe.json"
    for set in "$run"/evaluation/reference/*; do link "$set" "$ROOT/base/reference/$(basename "$set")"; done
}

table() { # table NAME...: the figures of these arms, over all seeds that were measured
    ${ATOLL_PYTHON:-.venv/bin/python} $here/table.py "$ROOT" "$recipe" "$@"
}
