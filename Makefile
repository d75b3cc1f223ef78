# `make demo` and `make test` need python3 (3.10 or newer) and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
SITE := $(VENV)/.site
# A worker more than cores, up to four: tests that start processes leave a core idle while they wait.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')

.PHONY: setup demo test test-all bench tables pictures docs docs-serve peers lint format package clean

setup: $(READY)

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kernelformer needs Python 3.10 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e lab
	@touch $@

# The C++ peer compiles against the installed torch (no build isolation) and takes a visible nvcc for a CUDA machine,
# so nvcc's folder is kept off PATH. It is optional: the benchmark leaves out what is not installed.
$(PEERS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]' setuptools wheel ninja
	-nvcc=$$(command -v nvcc); clean=$$(printf %s "$$PATH" | tr : '\n' | grep -vxF "$${nvcc%/nvcc}" | paste -sd: -); \
	PATH="$$clean" $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation pytorch-fast-transformers
	@touch $@

peers: $(PEERS)

demo: $(READY)
	$(BIN)/kernelformer demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m ''

bench: $(PEERS)
	$(BIN)/kernelformer bench

tables: $(READY)
	$(BIN)/python tools/pages tables

pictures: $(READY)
	$(BIN)/python tools/pages pictures

$(SITE): $(READY) pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The site of docs/ in build/site; a link that leads nowhere, or a docstring that cannot be read, is an error.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package:  # dist/, checked, and used from an environment that has torch alone
	PYTHON=$(PYTHON) bash .ci/package

clean:
	rm -rf $(VENV) .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache
