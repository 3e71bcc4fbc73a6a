# Everything runs in .venv, which the stamp rebuilds when pyproject.toml or constraints.txt change.
# On Linux without a CUDA GPU, PIP_EXTRA_INDEX_URL may name PyTorch's CPU index to avoid the CUDA build.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
WORKERS ?= 2

.PHONY: demo test test-slow check bench clean
.DELETE_ON_ERROR:

# One BLAS thread, so that processes do not fight over cores; no telemetry.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1

demo: $(STAMP)
	@$(BIN)/python infra/demo/make_assets.py runs/demo-assets
	@$(BIN)/lobra run infra/runs/demo.yaml --fresh
	@$(BIN)/lobra compare infra/runs/demo.yaml --fresh --strategies lobra:padded,lobra:packed,task_fused:packed,task_sequential:packed

# A test file stays on one worker, for its fixtures; each worker has servers and fleets of its own.
test: $(STAMP)
	@$(PYTEST) --numprocesses $(WORKERS) --dist loadfile

test-slow: $(STAMP)
	@$(PYTEST) -m "slow and not gpu"

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)
	@$(PYTEST) tests/benchmarks -m "" -s

clean:
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@echo "environment: $(VENV) from $$($(PYTHON) --version), packages of constraints.txt (a few minutes, about 2.6 GB)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo "environment: needs Python 3.11 or 3.12; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@
	@echo "environment: ready"
