#!/usr/bin/env bash
# Tests the code for GPUs on the null GPU: torch's real CUDA host code without a GPU, which counts every synchronization
# and copy (tests/nullgpu). Values are not real, so results are tested elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in gcc nm; do
    if ! command -v "$tool" > /dev/null; then
        echo "THE GPU CODE IS NOT TESTED: $tool is missing; install a C compiler and binutils"
        exit 0
    fi
done
source scripts/cuda_environment.sh
out=$PWD/build/nullgpu
bash tests/nullgpu/build.sh "$venv" "$out"
export NULLGPU=$out LD_LIBRARY_PATH=$out/stub LD_PRELOAD=$out/libnullcuda.so
"$python" -m pytest -m '' tests/nullgpu "$@"
