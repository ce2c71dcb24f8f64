#!/usr/bin/env bash
# Make .venv-clients with the clients that the tests of the server use. Their requirements may clash with ours.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-clients
if [ ! "$venv/.ready" -nt "$0" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check openai==3.51.0 litellm==1.83.0
    touch "$venv/.ready"
fi
