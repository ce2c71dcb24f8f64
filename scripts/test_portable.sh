#!/usr/bin/env bash
# Run the tests of flow, networks, training and sampling with the kernels of older processors: first with torch's default
# kernels, then, if this machine has AVX-512, with its AVX2 kernels. PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tests="tests/flow tests/nets tests/models tests/experts tests/ensemble tests/models tests/train"
failed=""

# check CAPABILITY NAME=VALUE …: run the tests with these environment variables; torch must report CAPABILITY.
check() {
    local capability=$1
    shift
    echo "== $tests with $*"
    # Without this check, a torch that ignores the variables would repeat make test and pass.
    env "$@" "$python" -c "import sys, torch
found = torch.backends.cpu.get_cpu_capability()
print('torch', torch.__version__, found)
sys.exit(found != '$capability' and f'torch uses {found} kernels, expected $capability')" || exit 1
    env "$@" "$python" -m pytest -n 2 $tests || failed="$failed $capability"
}

check DEFAULT ATEN_CPU_CAPABILITY=default
if grep -qsw avx512f /proc/cpuinfo; then
    # MKL and oneDNN select their kernels separately, so each needs a variable.
    check AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
else
    echo "== this machine has no AVX-512: make test already uses AVX2 kernels at most"
fi
# Run both before failing: a test that fails with only one of them narrows down the cause.
test -z "$failed" || { echo "failed with the kernels:$failed" >&2; exit 1; }
