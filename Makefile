# `make` lists the targets. Everything runs in VENV, made by the first target that needs it.

PYTHON ?= python3
VENV ?= .venv
# Installed first: a plain `pip install torch` may bring a newer CUDA build of several GB. May hold
# options of pip too: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu".
TORCH ?= torch==2.13.0
# Settings for `make quickstart`, e.g. LAYOUT="tensor_model_parallel_size=2".
LAYOUT ?=
PYTEST_ARGS ?=
# Kills of `make chaos`.
N ?= 9

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a process: several ranks share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
SHELL_FILES := $(wildcard slurm/*.sh slurm/*.sbatch tests/slurm/*.sh .ci/run)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart real test test-unit test-distributed test-e2e test-slurm parity check \
	check-kernels chaos format bench

help:
	@echo "make setup             make $(VENV) with everything in it (a few minutes, once)"
	@echo "make quickstart        a tiny model learns addition: SFT, GRPO, DPO (under 5 minutes)"
	@echo "                       LAYOUT=\"tensor_model_parallel_size=2 ...\" splits it over ranks"
	@echo "make real              SmolLM2-135M from a package: logits, GRPO, DPO, export (minutes)"
	@echo "make test              all tests: test-unit (with every YAML), test-distributed, test-e2e"
	@echo "make test-slurm        jobs on a real Slurm, started here; root on Linux, see slurm/README.md"
	@echo "make parity            every loss on every layout and backend has the numbers of one rank (7 minutes)"
	@echo "make check             format, lint, types, layers, shell scripts, house rules"
	@echo "make check-kernels     compiles every Triton kernel for four GPUs; no spills (3 minutes)"
	@echo "make chaos N=100       kills runs at random moments; what is left must be equal bit by bit"
	@echo "make format            rewrite the code in the house format"
	@echo "make bench             log-probs against other libraries; packed against padded; DPO and TRL"
	@echo "Settings: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH)"

setup: $(READY)
	@echo "setup: $(VENV) is ready ($$($(BIN)/python -V))"

# A venv that already exists is filled, not made anew.
$(READY): setup.py pyproject.toml
	@python="$(PYTHON)"; test ! -x $(BIN)/python || python=$(BIN)/python; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "PYTHON=$$python is $$($$python -V 2>&1 | tail -n 1); rl_megatron needs Python 3.11 or newer."; \
	echo "Name a newer one, and another VENV if $(VENV) exists: make setup PYTHON=python3.12"; exit 1; }
	@echo "setup: installing $(TORCH) and rl_megatron into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	@touch $@

quickstart: $(READY)
	@echo "quickstart: a tiny model learns addition, by SFT, then GRPO and DPO; results in runs/quickstart"
	$(BIN)/python tools/quickstart.py $(LAYOUT)

real: $(READY)
	@echo "real: a real model end to end on three ranks; results in runs/real"
	$(BIN)/python tools/real.py

test: test-unit test-distributed test-e2e

test-unit: $(READY)
	@echo "test-unit: one process each, and every YAML"
	$(PYTEST) -n 2 tests/unit tests/recipes

test-distributed: $(READY)
	@echo "test-distributed: several gloo processes that split one model"
	$(PYTEST) tests/distributed

test-e2e: $(READY)
	@echo "test-e2e: recipes and tools from their command line"
	$(PYTEST) tests/e2e

test-slurm: $(READY)
	@echo "test-slurm: jobs on a real Slurm with several nodes, started here (7 minutes)"
	$(PYTEST) tests/slurm

parity: $(READY)
	@echo "parity: every loss on every layout and backend against one rank (7 minutes); numbers in runs/parity.json"
	$(BIN)/python tools/parity.py

check: $(READY)
	@echo "check: format, lint, types, layers, shell scripts, house rules"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(SHELL_FILES),$(BIN)/shellcheck -x $(SHELL_FILES))
	$(BIN)/python tools/check_house_rules.py

check-kernels: $(READY)
	@echo "check-kernels: every Triton kernel for sm_80, sm_90, sm_100 and gfx942; no GPU needed (3 minutes)"
	$(BIN)/python tools/aot_kernels.py

chaos: $(READY)
	@echo "chaos: $(N) kills of SFT, reward models, DPO, KTO and GRPO on two ranks (10 seconds each); in runs/chaos"
	$(BIN)/python tools/chaos.py --kills $(N)

format: $(READY)
	@echo "format: ruff format, and what ruff check can mend"
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	@echo "bench: log-probs against other libraries and the bare products, packed against padded, the reference cache, the weights digest, DPO against TRL (a quarter of an hour)"
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[bench]"
	$(BIN)/python tools/bench/linear_logprob.py
	$(BIN)/python tools/bench/packing.py
	$(BIN)/python tools/bench/ref_cache.py
	$(BIN)/python tools/bench/weights_digest.py
	$(BIN)/python tools/bench/dpo_vs_trl.py
	$(BIN)/python tools/bench/checkpoint_save.py
