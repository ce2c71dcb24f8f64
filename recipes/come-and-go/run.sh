#!/usr/bin/env bash
# Experts come and go without retraining anything: nearest routing with 7, 8 and 9 experts, beside the router of the 8.
# The nine clusters are eight of features and one more; the experts of the partition into nine are trained here.
set -euo pipefail
source recipes/common/lib.sh
make_arm k9 9 features
train k9 0 1 2 3 4 5 6 7 8
for without in "" "8" "7 8"; do
    name=k9${without:+-without-${without// /-}}
    make_arm "$name" 9 features
    for expert in 0 1 2 3 4 5 6 7 8; do [[ " $without " == *" $expert "* ]] || take k9 "$name" $expert; done
    measure "$name" --models experts --routings nearest nearest:full oracle --extractors efficientnet-lite0
done
