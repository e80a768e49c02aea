# Everything runs in a virtual environment that the first call makes. Override on the command line:
#   make train ARGS="task=hopper seed=3"      make test PYTHON=python3.12 VENV=/tmp/venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Installed before everything else, from this one specification: no dependency gets to choose the
# build of PyTorch. pip's own configuration (index, constraints) decides where it comes from.
TORCH ?= torch==2.13.0
ARGS ?=
# Data and directory of `make report`.
CSV ?= docs/results/gymnasium_v5.csv
REPORT ?= docs/results/gymnasium_v5

PY := $(VENV)/bin/python
# Small tensors: more threads than one cost more than they bring.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# One stamp for each choice of PyTorch, so that another choice installs anew.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' '_')

.DEFAULT_GOAL := help
.PHONY: help install train report test test-slow suites-envpool lint format typecheck

help: ## show this text
	@echo "make TARGET [ARGS=...] [PYTHON=$(PYTHON)] [VENV=$(VENV)] [TORCH=$(TORCH)]"
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The stamp comes last: an interrupted installation leaves none, and is taken up by the next call.
$(STAMP): setup.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3 found: set PYTHON" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	@rm -f "$(VENV)"/.installed-*
	"$(PYTHON)" -m venv "$(VENV)"
	"$(PY)" -m pip install "$(TORCH)"
	"$(PY)" -m pip install "$(TORCH)" -e ".[dev,benchmark,export]"
	@touch "$@"

install: $(STAMP) ## make the virtual environment

train: $(STAMP) ## train (ARGS="task=hopper seed=3"; ARGS=--help lists the options)
	"$(PY)" examples/trudi_humanoid.py $(ARGS)

report: $(STAMP) ## tables and pictures of a benchmark's data (CSV=..., REPORT=directory); trains nothing
	"$(PY)" examples/benchmark.py report --csv "$(CSV)" --out "$(REPORT)" $(ARGS)

# A process for each CPU, up to four; a file's tests stay together, for the fixtures they share.
test: $(STAMP) ## run the tests, without the slow ones
	$(TEST_ENV) "$(PY)" -m pytest test -m "not slow" -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-slow: $(STAMP) ## run the slow tests
	$(TEST_ENV) "$(PY)" -m pytest test -m slow $(ARGS)

# The suites in the environments that their simulators need; slow tests too.
suites-envpool: $(STAMP) ## run the tests of the EnvPool suite, which this installs
	"$(PY)" -m pip install -e ".[envpool]"
	$(TEST_ENV) "$(PY)" -m pytest test/envs/suites $(ARGS)

lint: $(STAMP) ## check style and format
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .

format: $(STAMP) ## format the code
	"$(PY)" -m ruff check --fix .
	"$(PY)" -m ruff format .

typecheck: $(STAMP) ## check types
	"$(PY)" -m mypy
