# Everything here needs only make and a Python that is 3.11 or newer. Another interpreter than
# `python3` is named by hand: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALLED_TO_TRAIN := $(VENV)/installed-to-train

.PHONY: help train test test-all test-slow test-minimum lint format docs lock clean

help:
	@echo 'make train         train a classifier with FSDP over eight simulated devices'
	@echo '                   (more flags: make train ARGS="--config.seed=1")'
	@echo 'make test          run the tests that your changes can reach; without changes, all'
	@echo 'make test-all      run all tests'
	@echo 'make test-slow     run the tests left out of `make test` because they take long'
	@echo 'make test-minimum  run the tests with the oldest supported dependencies'
	@echo 'make lint          check style and types'
	@echo 'make format        bring the code into the house format'
	@echo 'make docs          build the site into build/site'
	@echo 'make lock          write constraints/ci.txt anew: the versions of continuous integration'
	@echo 'make clean         remove the environment, builds and caches'

train: $(INSTALLED_TO_TRAIN)
	$(BIN)/python -m experiments.fsdp --config=configs/fsdp.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest --changed $(ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# A stamp is younger than both files exactly when the environment holds what they ask for.
$(INSTALLED): EXTRAS := dev
$(INSTALLED_TO_TRAIN): EXTRAS := train,examples,plots
$(INSTALLED) $(INSTALLED_TO_TRAIN): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'manualpar needs Python 3.11 or newer, and `$(PYTHON)` is not:' \
	       'name another with `make PYTHON=python3.12`.' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV): $(INSTALLED)

# An environment of its own: the oldest versions are not what one develops with.
$(VENV)-minimum/installed: setup.cfg pyproject.toml constraints/minimum.txt
	$(PYTHON) -m venv $(VENV)-minimum
	$(VENV)-minimum/bin/python -m pip install --quiet --constraint constraints/minimum.txt \
	  --editable '.[test]'
	@touch $@

test-minimum: $(VENV)-minimum/installed
	$(VENV)-minimum/bin/python -m pytest $(ARGS)

# Asks pip what it would install into an empty environment, with Python 3.11 on Linux x86-64.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --dry-run --report $(VENV)-lock/report.json '.[dev]'
	$(PYTHON) .ci/lock <$(VENV)-lock/report.json >$(VENV)-lock/ci.txt
	mv $(VENV)-lock/ci.txt constraints/ci.txt
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-minimum $(VENV)-lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache \
	  .ruff_cache
	find configs experiments manualpar tests -name __pycache__ -prune -exec rm -rf {} +
