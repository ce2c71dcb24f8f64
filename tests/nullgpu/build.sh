#!/usr/bin/env bash
# Builds the null GPU: build.sh VENV OUT. VENV has the CUDA build of torch; OUT gets libnullcuda.so and stub/libcuda.so.1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
out=$2
mkdir -p "$out/stub"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$venv/bin/python" "$here/generate_stubs.py" "$site/torch/lib" "$here/nullcuda.c" "$out/nullcuda.c"
gcc -shared -fPIC -O1 -w -I "$site/triton/backends/nvidia/include" -o "$out/libnullcuda.so" "$out/nullcuda.c"
gcc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$out/stub/libcuda.so.1" "$here/driver_stub.c"
