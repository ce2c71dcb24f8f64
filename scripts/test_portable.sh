#!/usr/bin/env bash
# Runs the tests of the mathematics, networks, training and sampling as on lesser processors: first with torch's plain
# kernels, then, if this machine has AVX-512, with those of machines that stop at AVX2. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tests="tests/flow tests/nets tests/train tests/ensemble"

check() {
    echo "== $tests with $*"
    env "$@" "$python" -c 'import torch; print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())'
    env "$@" "$python" -m pytest -n 2 $tests
}

check ATEN_CPU_CAPABILITY=default
if grep -qsw avx512f /proc/cpuinfo; then
    # MKL and oneDNN pick their kernels by themselves, so each needs its own setting.
    check ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
else
    echo "== no AVX-512 here: make test has run with the AVX2 kernels already"
fi
