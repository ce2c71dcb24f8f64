#!/usr/bin/env bash
# Train one dense network with one setting changed at a time, then with all settings that pay:
#     DATASET=cifar10 SEED=0 bash recipes/fast/run.sh [ARM...]
# Every arm sees IMAGES images; `equal` is `stacked` with EQUAL percent of them, which cost the FLOPs of `base`. The validation
# error is measured every 2 % of them. KID is that of NUM_IMAGES images, for the arms in KID_ARMS (`none` for none).
set -euo pipefail
source recipes/common/lib.sh
IMAGES=${IMAGES:-51200}
BATCH=${BATCH:-32}
NUM_IMAGES=${NUM_IMAGES:-2048}
KID_ARMS=${KID_ARMS:-"base equal"}
STACK=${STACK:-"muon modern flip lr times"} # what the arms `stacked` and `equal` combine
EQUAL=${EQUAL:-80} # Newton-Schulz adds 24 % of FLOPs for 2,048 tokens in a batch and width 128
if [ $# -gt 0 ]; then arms=("$@"); else arms=(base muon modern align flip ema lr times stacked equal); fi

modern=${NETWORK/DiT-/ModernDiT-}
declare -A flags=(
    [base]=""
    [muon]="--train.optimizer muon"
    [modern]="--networks.default '$modern'"
    [align]="--features.patch_dimensions 64 --train.align {}"
    [flip]="--data.flip true"
    [ema]="--train.ema '{short: $((IMAGES / 160))}'"
    [lr]="--train.lr 8.0e-3"
    [x0]="--experts.default x0"
    [times]="--experts.default flow-matching-logit-normal"
    [stacked]=""
)
for flag in $STACK; do
    # A mirrored emoji is another one (flags, arrows), so emoji are not flipped.
    [ "$DATASET/$flag" = emoji/flip ] || flags[stacked]+=" ${flags[$flag]}"
done
flags[equal]=${flags[stacked]}

data_flags() { # data_flags ARM: print the flags of an arm that change the data
    eval "set -- ${flags[$1]}"
    while [ $# -gt 0 ]; do
        case $1 in --data.* | --features.*) printf '%s %s ' "$1" "$2" ;; esac
        shift 2
    done
}

run_arm() { # run_arm NAME: prepare, train and evaluate one arm
    local run data own images=$IMAGES
    [ "$1" != equal ] || images=$((IMAGES * EQUAL / 100))
    run=$(arm "fast-$1")
    own=$(data_flags "$1")
    data=$ROOT/dense$(echo "$own" | tr -c 'a-z0-9\n' '-')
    mkdir -p "$run" "$data"
    if [ ! -f "$data/prepared" ]; then
        for part in ingest features latents text; do
            # Flips have latents of their own.
            case $part$own in latents*--data.flip*) ;; *) link "$ROOT/base/data/$part" "$data/data/$part" ;; esac
        done
        { dataset_settings; echo "clusters: {count: 1}"; } > "$data/atoll.yaml"
        $atoll prepare "$data" $own
        touch "$data/prepared"
    fi
    link "$data/data" "$run/data"
    {
        dataset_settings
        echo "clusters: {count: 1}"
        echo "networks: {default: $NETWORK}"
        settings train "$BATCH" "$images"
        printf '  %s\n' "lr: ${LR:-4.0e-3}" "lr_schedule: cosine" "seed: $SEED" "sample_every: 0" "validate_every: $((images / 50))"
    } | write_settings "$run/atoll.yaml"
    eval "$atoll train '$run' --expert 0 ${flags[$1]}"
    case " $KID_ARMS " in *" $1 "*) evaluate "fast-$1" --models expert:0 --without diversity trajectories diagnostics ;; esac
}

prepare
# JOBS arms at a time, one thread each. Data is prepared one arm after the other.
for name in "${arms[@]}"; do
    [ "$DATASET/$name" != emoji/flip ] || continue
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
    if [ -f "$ROOT/dense$(data_flags "$name" | tr -c 'a-z0-9\n' '-')/prepared" ]; then run_arm "$name" & else run_arm "$name"; fi
done
wait
$python recipes/fast/table.py "$ROOT" "${arms[@]}"
