# Every target sets up what it needs in $(VENV). Another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORES ?= 2
NATIVE_TESTS := tests/backends/cpu tests/core/test_laws.py tests/gemm/test_laws.py
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
NATIVE_STAMP := $(VENV)/.installed-native
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo native test test-core test-native test-sweep lint docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable '.[dev]'
	touch $@ $(DEMO_STAMP)

# the demo needs jax and little else: no compilers, no tools
$(DEMO_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[cli]'
	touch $@

demo: $(DEMO_STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python examples/demo.py

# native CPU kernels, compiled against the jaxlib that is installed; the tests, the demo and trencadis do without
native: $(NATIVE_STAMP)

$(NATIVE_STAMP): $(STAMP) $(wildcard native/*.toml native/*.py native/src/* native/trencadis_cpu/*.py)
	$(PIP) 'setuptools>=65' wheel
	$(PIP) --no-build-isolation ./native
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal -q

test-core: $(STAMP)
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal -q -m "core and not sweep and not once"

# tests of native kernels, and the laws of products with them
test-native: $(NATIVE_STAMP)
	TRENCADIS_TEST_NATIVE=1 $(BIN)/python -m pytest -n $(CORES) --dist worksteal -q $(NATIVE_TESTS)

# the cases that `make test` leaves out
test-sweep: $(STAMP)
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal -q -m sweep

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --config-file= --cache-dir=$(VENV)/mypy tests/support/user_program.py
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python tests/support/user_program.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/size.py

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

bench: $(STAMP)
	$(BIN)/python -m benchmarks run

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
