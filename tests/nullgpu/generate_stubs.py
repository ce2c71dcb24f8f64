"""Write the null CUDA library: nullcuda.c, and a stub for every other CUDA and cuBLAS symbol that torch imports.

python generate_stubs.py TORCH_LIB NULLCUDA_C OUT_C
"""

import re
import subprocess
import sys
from pathlib import Path

LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_cuda_linalg.so")
NOT_CALLS = {"cudaGetErrorName", "cudaGetErrorString"}
"""They return text, so a stub that returns 0 would crash; libcudart has them."""


def imported(library: Path) -> set[str]:
    """Return the CUDA and cuBLAS symbols that a library imports."""
    listing = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^\s+U ((?:cublas|cuda)\w+)", listing, re.MULTILINE))


def stub(name: str) -> str:
    """Return a function that succeeds; matrix products are counted."""
    product = name.startswith("cublas") and "emm" in name.lower()
    body = "return multiplied(cublas_stream);" if product else f'return unknown("{name}");'
    return f"int {name}(void) {{ {body} }}\n"


def main(torch_lib: str, source: str, out: str) -> None:
    """Write the C file."""
    written = Path(source).read_text(encoding="utf-8")
    known = set(re.findall(r"\b((?:__)?(?:cuda|cublas)\w+)\(", written)) | NOT_CALLS
    names = set().union(*(imported(Path(torch_lib) / name) for name in LIBRARIES)) - known
    Path(out).write_text(written + "".join(stub(name) for name in sorted(names)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
