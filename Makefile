# Set-up happens by itself: each target that needs the virtual environment makes it first.
# `make PYTHON=python3.12 test` chooses the interpreter; Python 3.11 or later and make are all that must be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Speed as a ratio against the obvious alternative; the other programs in benchmarks/ take longer, and are run by name.
BENCHMARKS := worker_start.py help_start.py harness_overhead.py watch_cost.py count_7b.py "trace_decode.py --megabytes 50" "race_cost.py --races 10"

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types imports compiled format bench dist docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## .venv with Redline and all that working on it needs; again when pyproject.toml changes

demo: venv ## measure a model on the device that is here
	$(BIN)/redline demo

# Tests start many processes, and wait for them a fifth of their time: with three workers two cores are always busy.
# What comes before them runs side by side, as mypy, the longest of it, uses one core.
test: venv ## everything that must hold before a change is done
	@$(MAKE) --no-print-directory -j 3 lint types imports compiled docs
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Byte-code of our own files, also where the environment forbids to write it: each process loads them. And of the tests where there
# is none yet: each worker would make it, in 9 s. A test that cannot be collected is reported by the tests themselves.
compiled: venv
	@$(BIN)/python -m compileall -q src
	@[ -d tests/analyze/__pycache__ ] || $(BIN)/python -m pytest --collect-only -q >/dev/null || true

lint: venv ## ruff, as linter and as formatter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## mypy
	$(BIN)/mypy

# Without its cache: that keeps an import of a module that was missing at the time as it was seen then.
imports: venv ## the arrows between the rooms
	$(BIN)/lint-imports --no-cache

format: venv ## let ruff rewrite what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: venv ## speed against the obvious alternative, in a few minutes
	@set -e; for program in $(BENCHMARKS); do echo "== $$program"; $(BIN)/python benchmarks/$$program; done

dist: venv ## wheel and source distribution in dist/
	rm -rf dist
	$(BIN)/python -m build -o dist .

docs: venv ## the documentation as a site in build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f tools/docs/mkdocs.yml --site-dir ../../build/site

clean: ## remove caches and build outputs; the virtual environment stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests benchmarks tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Byte-code is compiled at once: without it the first import of torch takes twice as long.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Redline needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo "$(PYTHON) cannot make virtual environments: install its venv package (apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode -e '.[dev]'
	@touch $@
