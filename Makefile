# `make audit` shows what poolaudit finds; `make test` proves that it works. Both set up what they need, once.
#
#   make audit                    audit examples/longdoc (needs Python 3.11 or newer, no torch)
#   make audit TARGET=../project  audit another tree
#   make test                     every test (installs torch)
#   make check                    what a change must pass: lint, format, types, import walls, fast tests, self-audit
#   make gpu                      the leak tests of the reference modules on a CUDA device, kept in benchmarks/results
#   make fuzz                     the property tests, with many more examples, every set of labelled programs, the whole standard library
#
# The pool is driven by 100,000 programs in ten processes: what draws them remembers all it drew.
# Leak tests run by themselves; on a machine with a CUDA device one after the other: another test's worker must
# not allocate there beside them. What they measure on the CPU is their own process.
# PYTHON chooses the interpreter, PIP_ARGS is handed to pip (for instance an index with CPU-only torch).

.DEFAULT_GOAL := audit
.PHONY: audit test check fuzz gpu clean

PYTHON ?= $(or $(foreach v,3.11 3.12 3.13 3.14,$(shell command -v python$(v))),python3)
TARGET ?= examples/longdoc
PIP_ARGS ?=
PYTEST_ARGS ?=
LEAK_WORKERS ?= $(if $(wildcard /dev/nvidia[0-9]*),0,2)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt $(PIP_ARGS)
SCHEMA := $(VENV)/share/sarif
DEV := check-jsonschema jsonschema pytest pytest-timeout pytest-xdist hypothesis mypy ruff import-linter pygls types-networkx numpy torch

audit: $(VENV)/.installed
	@$(BIN)/poolaudit audit --exit-zero $(TARGET)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/generated --ignore tests/leaktests $(PYTEST_ARGS)
	$(BIN)/python -m pytest -n $(LEAK_WORKERS) tests/generated tests/leaktests $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" --ignore tests/generated --ignore tests/leaktests $(PYTEST_ARGS)
	$(BIN)/python -m pytest -n $(LEAK_WORKERS) -m "not slow and not gpu" tests/leaktests $(PYTEST_ARGS)
	$(BIN)/poolaudit audit auditor rules reports reference_modules

fuzz: $(VENV)/.installed-dev
	POOLAUDIT_FUZZ=1 $(BIN)/python -m pytest --timeout 3600 -k "property or generated_programs or score_of_the_programs or the_standard_library" $(PYTEST_ARGS)
	for part in 1 2 3 4 5 6 7 8 9 10; do \
	  POOL_FUZZ_PROGRAMS=10000 $(BIN)/python -m pytest --timeout 7200 tests/reference_modules/test_pool_fuzz.py $(PYTEST_ARGS) || exit; done

gpu: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.gpu_leaktests

clean:
	rm -rf $(VENV)

# Stamps: an environment is built again only if what it is built from changed. setuptools comes first and the
# build is not isolated, so that a second installation needs no network.
$(VENV)/.created:
	@echo "Setting up $(VENV) with $(firstword $(PYTHON)) ..."
	@$(firstword $(PYTHON)) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"poolaudit needs Python 3.11 or newer, this is {sys.version}; say PYTHON=/path/to/python3.11")'
	@$(firstword $(PYTHON)) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints-dev.txt
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools and torch ..."
	@$(PIP) $(DEV)
	@mkdir -p $(SCHEMA)
	@{ $(BIN)/python -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-binary sarif-om -d $(SCHEMA) sarif-om==1.0.4 \
	   && tar -xzf $(SCHEMA)/sarif_om-1.0.4.tar.gz -C $(SCHEMA) --strip-components 1 sarif_om-1.0.4/sarif-2.1.0-rtm.4.json; } \
	  || echo "No SARIF schema: the tests that need it will be skipped."
	@touch $@
