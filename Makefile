# Front door. Each command sets up what it needs (.venv, dependencies, the compiled core) and starts at once
# when nothing changed; the logic is in scripts/.

# The Python that runs scripts/setup_env.py, which then chooses the one to build on.
BOOT := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 7))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
PYTHON := $(VENV)/bin/python

NAME ?=
RESUME ?=
STEPS ?=
BALANCE ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup build pretrain test format lint test-cpp test-python test-megatron test-slurm test-matrix parity bench docs tables cuda ptx-soak simulate-soak clean

help:  ## print this list
	@echo "make COMMAND [VARIABLE=value ...]"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup:
ifeq ($(BOOT),)
	@echo "hybrid_ep needs Python 3.10 to 3.14 on PATH (Debian/Ubuntu: apt-get install python3 python3-dev python3-venv)." >&2; exit 1
endif
	@$(BOOT) scripts/setup_env.py --venv $(VENV)

build: setup  ## environment, dependencies and the compiled core, whatever of them changed

pretrain: setup  ## pretrain a small MoE GPT on this machine [NAME= RESUME= STEPS= BALANCE=exact]
	@$(PYTHON) -m recipes.pretrain $(if $(RESUME),--resume '$(RESUME)',tiny_cpu) $(if $(NAME),--name '$(NAME)') \
	  $(if $(STEPS),--steps '$(STEPS)') $(if $(BALANCE),--balance '$(BALANCE)') $(ARGS)

test: setup  ## every check and test, stage by stage [ARGS="--quick", ARGS="--only python,cpp"]
	@$(PYTHON) scripts/run_tests.py $(ARGS)

format: setup  ## lay out every Python and C++ file
	@$(PYTHON) -m ruff format .
	@$(PYTHON) scripts/format_cpp.py

lint: setup  ## ruff, layouts, the layer rules, mypy and the core's types
	@$(PYTHON) scripts/run_tests.py --only lint,layers,types

test-cpp: setup  ## C++ tests: plain, mutants, ThreadSanitizer, AddressSanitizer
	@$(PYTHON) scripts/run_tests.py --only cpp,cpp-mutants,cpp-tsan,cpp-asan,python-asan

test-python: setup  ## tests/python
	@$(PYTHON) scripts/run_tests.py --only python

test-megatron: setup  ## tests/megatron with the installed megatron-core
	@$(PYTHON) scripts/run_tests.py --only megatron

test-slurm: setup  ## tests/slurm on a Slurm of four nodes on this machine (root; installs it through apt)
	@$(PYTHON) scripts/run_tests.py --only slurm

test-matrix: setup  ## tests/megatron with megatron-core 0.16, 0.17, 0.18 and 0.19 [ARGS="--versions 0.16,0.19"]
	@$(PYTHON) scripts/test_matrix.py $(ARGS)

parity: setup  ## the same training with Megatron's dispatchers and ours, losses compared
	@$(PYTHON) scripts/parity.py $(ARGS)

bench: setup  ## time dispatch and combine [ARGS="--peers"]
	@$(VENV)/bin/hybrid-ep bench $(ARGS)

cuda: setup  ## the CUDA library for sm_90a and sm_100, with nvcc from pip, inspected
	@$(PYTHON) scripts/run_tests.py --only cuda

ptx-soak: setup  ## the CUDA library's PTX on the interpreter, by seed; needs nvcc, no GPU [ARGS="--seeds 10 --everyday"]
	@$(PYTHON) tests/ptx/soak.py $(ARGS)

simulate-soak: setup  ## 100,000 simulated worlds by seed [ARGS="--seeds 1000"]
	@$(PYTHON) -m hybrid_ep.explorer.soak --seeds 100000 --jobs $$(nproc) $(ARGS)

docs: setup  ## the documentation site, in docs/_build/html
	@$(PYTHON) scripts/run_tests.py --only docs
	@echo "docs/_build/html/index.html"

tables: setup  ## what docs and README show of the performance model, written anew: tables, figures, pictures
	@$(PYTHON) scripts/make_tables.py $(ARGS)

clean:  ## remove builds and caches; environments (.venv, .venvs) and runs/ stay
	rm -rf build dist docs/_build docs/_generated hybrid_ep/_core*.so .pytest_cache .ruff_cache .hypothesis
	find hybrid_ep megatron_patches recipes scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
