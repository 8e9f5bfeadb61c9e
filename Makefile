PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: install serve test lint bench clean

install: $(INSTALLED)

$(INSTALLED): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# ARGS passes options on: make serve ARGS="--port 9000"
serve: $(INSTALLED)
	@exec $(BIN)/backfill serve $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build
