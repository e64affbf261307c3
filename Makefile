# SETUP=0 uses the Python environment that is there; see tests/env.sh.
# PYTEST_ARGS=… adds options to the test targets, e.g. PYTEST_ARGS="-k plan -x"; TEST_WORKERS=1 runs
# one test at a time.
SHELL := bash
export PYTHONSAFEPATH := 1
export SETUP ?= 1

RUN := tests/env.sh run
PYTEST := tests/env.sh pytest --durations=10 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup test test-full test-gpu check lint types imports demo clean

help:
	@echo "make setup      install the test environment into .venv (other targets do it too)"
	@echo "make test       the CPU suite, in less than 20 minutes with the installation"
	@echo "make test-full  the CPU suite with everything slow"
	@echo "make test-gpu   what needs a CUDA device"
	@echo "make check      ruff, mypy, import rules"
	@echo "make demo       chat with a real model through the kernels, on a GPU or the CPU"

setup:
	@tests/env.sh setup

test: setup
	$(PYTEST) -m "not gpu and not slow"

test-full: setup
	$(PYTEST) -m "not gpu"

test-gpu: setup
	TEST_WORKERS=1 $(PYTEST) -m gpu

check: lint types imports

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .

# Checkers cannot see through an editable install of mapped folders, hence the tree of links.
.PHONY: links
links: setup
	@$(RUN) python3 tests/link_tree.py .links

types: links
	MYPYPATH=.links $(RUN) python3 -m mypy

imports: links
	PYTHONPATH=.links $(RUN) lint-imports

demo: setup
	@tests/env.sh model
	$(RUN) python3 tests/demo/demo.py

clean:
	rm -rf .links .venv .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
