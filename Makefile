# Every target sets up what it needs; a fresh machine needs only Python 3.11 or later with its venv module.
#   make test    lint, then all tests        make demo    a training run through kills, joins and rescales
#   make soak    the long tests              make bench   side by side with DDP, torchrun and Ray Train

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PYTEST := $(BIN)/python -m pytest

# The first Python that is new enough and can make environments; `make PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$p"; break; }; done)

include ray.env
export $(shell sed -n 's/=.*//p' ray.env)

.DEFAULT_GOAL := help
.PHONY: help setup lint format test soak demo bench clean

help:
	@sed -n '2,3s/^# *//p' Makefile

setup: $(STAMP)

# Keeps an environment that is there, completes one that is half made.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { \
		echo "everstep needs Python 3.11 or later with venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV); the first time fetches torch and ray"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Cluster tests come last and one by one: each starts Ray nodes and measures them.
test: lint
	$(PYTEST) -n 2 --dist loadgroup tests/unit tests/procs
	$(PYTEST) tests/cluster
	$(PYTEST) tests/e2e

soak: $(STAMP)
	$(PYTEST) -m soak --timeout 3600 tests

demo: $(STAMP)
	$(BIN)/python -m examples.demo

bench: $(STAMP)
	$(BIN)/python -m benchmarks.steady
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.control_plane

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
