# make serve, make test, make test-all: everything from a fresh clone, with Python 3.11, make and a C++ compiler.
# ARGS passes options on: make serve ARGS="--port 9000", make test ARGS="-k scheduler".
PYTHON ?= python3.11
# Tests run in so many processes at once; 0 runs them in one, as plain pytest does.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# An editable install remembers where each module was, so a changed list of files needs a new one.
MODULES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
RUNNABLE := $(VENV)/.runnable-$(MODULES)
TESTABLE := $(VENV)/.testable-$(MODULES)
# A file stays on one worker, with the fixtures that its tests share, and some folders do; in the order of collection,
# the slow files first (tests/conftest.py).
IN_PARALLEL := --dist loadfile --no-loadscope-reorder
# The variables are for what builds the package: pip takes -c for what it installs alone.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
  $(BIN)/pip install --disable-pip-version-check -c constraints.txt
# Where torch's build without CUDA comes from, on a machine without an NVIDIA GPU. TORCH_INDEX= asks no such index.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia0 /dev/nvidiactl /dev/dxg),,https://download.pytorch.org/whl/cpu)

# What depends on the kernels, and which of their variants to run it with; by default all that this machine has.
NUMERIC_TESTS := $(addprefix tests/,kernels models execution engine llm api cli bench/test_throughput.py)
VARIANTS = $(shell $(BIN)/python -c 'from backfill.kernels.cpu import available_isas; print(*available_isas())')

# Tests that make test leaves to make test-all; pyproject.toml says what they are.
LEFT_OUT := browser or gpu or postgres or ray or s3 or slow

.PHONY: install install-dev lock serve test test-all test-variants lint bench clean

install: $(RUNNABLE)

install-dev: $(TESTABLE)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed; name another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The index is asked for torch alone, and not for long: pip would ask an extra index for every package.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@test -z "$(TORCH_INDEX)" || $(PIP) --retries 1 --timeout 10 --no-deps --index-url $(TORCH_INDEX) torch \
	  || echo "torch comes from the package index instead: with CUDA, 2.7 GB to download." >&2
	@touch $@

$(RUNNABLE): $(SOURCES) $(VENV)/.torch
	@echo "Fetching packages and compiling the kernels; compiling takes a minute or two, without output." >&2
	$(PIP) -e '.[plot]'
	@rm -f $(VENV)/.runnable-* && touch $@

$(TESTABLE): $(SOURCES) $(VENV)/.torch
	$(PIP) -e '.[dev]'
	@rm -f $(VENV)/.testable-* $(VENV)/.runnable-* && touch $(RUNNABLE) $@

# constraints.txt anew: the newest versions that pyproject.toml allows, for each Python from 3.11 on, of the package,
# its extras and what builds it. With UPGRADE= what is locked stays, and only what is missing comes. It has no hashes: pip
# would then want one of the package itself, and torch has other files in each of its two indexes.
UPGRADE ?= --upgrade
BUILD_REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --disable-pip-version-check --quiet uv
	{ build/lock/bin/python -c '$(BUILD_REQUIRES)'; printf 'cmake\nninja\n'; } | build/lock/bin/uv pip compile --quiet \
	  --universal --python-version 3.11 --all-extras --no-annotate --custom-compile-command 'make lock' $(UPGRADE) \
	  -o constraints.txt pyproject.toml -

# make serve PORT=8001: as ARGS="--port 8001". A variable of that name in the environment may be another program's.
serve: $(RUNNABLE)
	@exec $(BIN)/backfill serve $(if $(findstring command,$(origin PORT)),--port $(PORT)) $(ARGS)

test: $(TESTABLE)
	$(BIN)/python -m pytest -n $(WORKERS) $(IN_PARALLEL) -m 'not ($(LEFT_OUT))' $(ARGS)

# And what starts a database, an object store or a cluster, and what is slow.
test-all: $(TESTABLE)
	$(BIN)/python -m pytest -n $(WORKERS) $(IN_PARALLEL) $(ARGS)

# As other machines run them: BACKFILL_CPU_ISA limits our kernels and the libraries beside them.
test-variants: $(TESTABLE)
	@failed=; for isa in $(VARIANTS); do \
	  echo "== BACKFILL_CPU_ISA=$$isa"; \
	  BACKFILL_CPU_ISA=$$isa $(BIN)/python -m pytest -n $(WORKERS) $(IN_PARALLEL) $(NUMERIC_TESTS) $(ARGS) \
	    || failed="$$failed $$isa"; \
	done; \
	echo "Ran with: $(VARIANTS). Failed with:$${failed:- none}."; test -z "$$failed"

lint: $(TESTABLE)
	$(BIN)/ruff check src experiments tests benchmarks
	$(BIN)/ruff format --check src experiments tests benchmarks
	$(BIN)/clang-format --dry-run --Werror csrc/*
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(RUNNABLE)
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/peers.py $(PEERS)

clean:
	rm -rf $(VENV) build
