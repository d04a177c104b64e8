# Every target sets up what it needs first, in .venv; see .ci/bootstrap.
#   make test PYTHON=python3.9    with this Python instead of the first that fits
#   make test ARGS='-k engine'    arguments for pytest, or for examples/demo.py

.DEFAULT_GOAL := help
.PHONY: help test lint format demo clean setup

PYTHON ?=
ARGS ?=
TEST_LIMIT_S ?= 1800
RUN := .venv/bin/python
export PYTHON

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

test: setup  ## every test
	@timeout --foreground -s INT -k 30 $(TEST_LIMIT_S) $(RUN) -m pytest $(ARGS)

lint: setup  ## ruff and strict mypy
	@$(RUN) -m ruff check --output-format concise .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy --strict p3

format: setup  ## put the code into ruff's form
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

demo: setup  ## two workers and two servers train on real images, beside MXNet's own dist_sync
	@$(RUN) examples/demo.py $(ARGS)

clean:  ## take away .venv and everything made here
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup:
	@sh .ci/bootstrap
