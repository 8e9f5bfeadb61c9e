# make serve, make test: everything from a fresh clone, with Python 3.11, make and a C++ compiler.
# ARGS passes options on: make serve ARGS="--port 9000", make test ARGS="-k scheduler".
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# An editable install remembers where each module was, so a changed list of files needs a new one.
MODULES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
RUNNABLE := $(VENV)/.runnable-$(MODULES)
TESTABLE := $(VENV)/.testable-$(MODULES)
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt

.PHONY: install install-dev serve test lint bench clean

install: $(RUNNABLE)

install-dev: $(TESTABLE)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed; name another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNNABLE): $(SOURCES) | $(BIN)/python
	$(PIP) -e .
	@rm -f $(VENV)/.runnable-* && touch $@

$(TESTABLE): $(SOURCES) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@rm -f $(VENV)/.testable-* $(VENV)/.runnable-* && touch $(RUNNABLE) $@

serve: $(RUNNABLE)
	@exec $(BIN)/backfill serve $(ARGS)

test: $(TESTABLE)
	$(BIN)/python -m pytest $(ARGS)

lint: $(TESTABLE)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(RUNNABLE)
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/peers.py $(PEERS)

clean:
	rm -rf $(VENV) build
