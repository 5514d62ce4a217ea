# The one door for developers' commands. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all bench docs pictures lint types format check package clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F '\t' '{printf "make %-12s %s\n", $$1, $$2}'

setup: $(INSTALLED)  ## make the virtual environment (.venv) with the tested versions of everything

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(INSTALLED)  ## one exact GRPO step of SmolLM2-135M under a budget, on the CPU
	$(BIN)/engine execute quickstart

test: $(INSTALLED)  ## all tests but the slow ones; those that need a GPU skip themselves without one
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(INSTALLED)  ## every test
	$(BIN)/python -m pytest -n $(WORKERS)

bench: $(INSTALLED)  ## one step against dense autograd and one packed sequence: bytes and time (half an hour)
	$(BIN)/python -m tests.benchmarks.step_against_alternatives --shares-only

docs: $(INSTALLED)  ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W -n --keep-going -d docs/_build/doctrees docs docs/_build/html

pictures: $(INSTALLED)  ## measure and draw the pictures of the documentation (minutes)
	$(BIN)/python docs/pictures/draw.py bytes docs/pictures/bytes.svg
	$(BIN)/python docs/pictures/draw.py learning docs/pictures/learning.svg

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test  ## what a change must pass

package: $(INSTALLED)  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

clean:  ## remove caches and build artefacts; runs/ and the virtual environment stay
	rm -rf build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find engine stages models plans tests -name __pycache__ -type d -prune -exec rm -rf {} +
