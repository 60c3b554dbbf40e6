# Every target sets up what it needs first; a finished set-up costs a fraction of a second.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
# The engine's models come from a seed: nothing is ever fetched at run time.
export HF_HUB_OFFLINE := 1
# A notice about another documentation tool, at every build.
export NO_MKDOCS_2_WARNING := 1

# The demo: the default benchmark at a size that ends in about two minutes on two cores.
DEMO_ARGS ?= --requests 120
# Files that start with an underscore are parts of others; gpu_check.py needs a GPU, matrix.py is `make matrix`,
# compare_disk.py starts thirty engines one after another.
LEFT_OUT := $(addprefix benchmarks/,gpu_check.py matrix.py compare_disk.py _%)
BENCHMARKS ?= $(filter-out $(LEFT_OUT),$(wildcard benchmarks/*.py))
# Arguments for pytest: make test PYTEST_ARGS="-m 'not engine' -x"
PYTEST_ARGS ?=

.PHONY: help setup demo matrix test lint format type layers docs docs-serve bench coverage clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv (about 1 GB the first time, then nothing)
	@scripts/setup.sh

demo: setup ## a real engine: prompts computed, saved, put back, compared
	@$(BIN)/kvquilt bench $(DEMO_ARGS)

matrix: setup ## every tiny model, both partitions; writes docs/matrix.md
	@$(BIN)/python benchmarks/matrix.py

test: setup ## all tests, in two halves side by side: unit, property, harness, engine
	@$(BIN)/python scripts/run_tests.py $(PYTEST_ARGS)

lint: setup ## ruff, format check, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: setup ## let ruff rewrite
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

type: setup ## mypy --strict
	@$(BIN)/mypy

layers: setup ## who may import whom
	@$(BIN)/lint-imports --no-cache

docs: setup ## build the docs into site/, warnings are errors
	@$(BIN)/mkdocs build --strict --quiet
	@echo "docs: site/index.html"

docs-serve: setup ## the docs with live reload
	@$(BIN)/mkdocs serve

bench: setup ## every benchmark that needs no GPU: figure, limit, ratio
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

coverage: setup ## coverage of the fast tests
	@$(BIN)/python -m pytest -m "not engine" --cov --cov-report=term
	@rm -f .coverage .coverage.*

clean: ## caches and build output, not .venv
	@rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache .coverage .coverage.*
