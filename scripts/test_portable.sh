#!/usr/bin/env bash
# Runs the tests of the mathematics, networks, training and sampling as on lesser processors: first with torch's plain
# kernels, then, if this machine has AVX-512, with those of machines that stop at AVX2. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tests="tests/flow tests/nets tests/convert tests/experts tests/ensemble tests/export tests/train"
failed=""

# check CAPABILITY NAME=VALUE …: run the tests in this environment, where torch must report that capability.
check() {
    local capability=$1
    shift
    echo "== $tests with $*"
    # Without this check, a torch that ignores the setting would run the kernels of make test once more and pass.
    env "$@" "$python" -c "import sys, torch
found = torch.backends.cpu.get_cpu_capability()
print('torch', torch.__version__, found)
sys.exit(found != '$capability' and f'torch uses {found} kernels, expected $capability')" || exit 1
    env "$@" "$python" -m pytest -n 2 $tests || failed="$failed $capability"
}

check DEFAULT ATEN_CPU_CAPABILITY=default
if grep -qsw avx512f /proc/cpuinfo; then
    # MKL and oneDNN pick their kernels by themselves, so each needs its own setting.
    check AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
else
    echo "== no AVX-512 here: make test has no better kernels than AVX2 to begin with"
fi
# Both runs are made before the verdict: a test that fails in one of them only tells more.
test -z "$failed" || { echo "failed with the kernels:$failed" >&2; exit 1; }
