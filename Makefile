# Every verb makes what it needs. Two stamps: what a run needs, and what tests and checks need on top.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On Linux without a GPU, PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" avoids torch's CUDA packages.
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt $(PIP_ARGS)
# Tiny models are fastest with one thread a process.
export OMP_NUM_THREADS ?= 1
RECIPE ?= recipes/tiny_cpu.toml
RUN ?= runs/tiny

.PHONY: run test test-slow test-gpu check format bench clean

run: $(VENV)/.ready
	$(BIN)/contraflow run $(RECIPE) --folder $(RUN)-$$(date +%Y%m%d-%H%M%S)
	@echo "more: source $(BIN)/activate; contraflow --help"

test: $(VENV)/.ready-dev
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: $(VENV)/.ready-dev
	$(BIN)/pytest -m slow

test-gpu: $(VENV)/.ready-dev
	$(BIN)/pytest -m gpu

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready-dev
	for name in startup channel refresh rollout seeds loop; do $(BIN)/python -m bench.$$name || exit 1; done

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), sys.version' || \
	  { echo "contraflow needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install -q 'pip>=25.1'

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing contraflow and torch into $(VENV) (about a minute the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the test tools into $(VENV)"
	$(PIP) --group dev
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache
