# Two commands to know: `make build` and `make test`. Needs Python 3.10+ with pip and venv, and g++; nothing else.
# Each makes its own virtual environment on first use; later runs need no network.

PYTHON ?= python3
ARCH ?= sm_100
BUILD_FLAGS ?=
PYTEST_FLAGS ?=
PROVE_FLAGS ?=
SWEEP_FLAGS ?=
FUZZ_FLAGS ?=
MATRIX_FLAGS ?=
# For test-gpu: a python that has torch, and the bundle to check.
GPU_PYTHON ?= python3
BUNDLE ?=

BUILD_VENV := .venv
TEST_VENV := .venv-test
FLAVOURS_VENV := .venv-flavours
BUILD_STAMP := $(BUILD_VENV)/.installed
TEST_STAMP := $(TEST_VENV)/.installed
INSTALLED_BY := pyproject.toml constraints.txt
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help build plan test prove-ptx fuzz digests check check-flavours check-matrix sweep format test-gpu stress-gpu measure clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name what; do printf '  %-15s %s\n' "$$name" "$$what"; done

build: $(BUILD_STAMP) ## build a bundle: artifacts/kimi_k3-$(ARCH)/ (ARCH="sm_100 sm_90" for several)
	$(BUILD_VENV)/bin/attnres-aot build $(addprefix --arch ,$(ARCH)) $(BUILD_FLAGS)

digests: $(BUILD_STAMP) ## print the sha256 of every image of configs/kimi_k3_all.yaml, to see whether a change left the code alone
	@$(BUILD_VENV)/bin/attnres-aot build $(addprefix --arch ,$(ARCH)) --config configs/kimi_k3_all.yaml >&2
	@cd artifacts && sha256sum $(foreach arch,$(ARCH),kimi_k3_all-$(arch)/*.cubin)

plan: $(BUILD_STAMP) ## show what `make build` would build
	$(BUILD_VENV)/bin/attnres-aot plan $(addprefix --arch ,$(ARCH))

test: $(TEST_STAMP) ## run the unit tests; no GPU needed
	$(TEST_VENV)/bin/python -m pytest tests/unit --numprocesses auto --dist worksteal $(PYTEST_FLAGS)

prove-ptx: $(TEST_STAMP) ## run the PTX of every image on the CPU, against fp64; some ten minutes, see docs/ptx_machine.md
	$(TEST_VENV)/bin/python -W ignore tests/ptx_machine/prove.py $(PROVE_FLAGS)

fuzz: $(TEST_STAMP) ## read 200,000 mutated configuration files and as many manifests, and bundles with a byte changed; some quarter of an hour
	$(TEST_VENV)/bin/python tests/fuzz/yaml_files.py $(FUZZ_FLAGS)
	$(TEST_VENV)/bin/python tests/fuzz/bundles.py $(FUZZ_FLAGS)

check: $(TEST_STAMP) ## everything that CI runs: format, lint, types, tests
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff check --isolated --select F attnres_aot/kernels # other rules do not fit device code
	$(TEST_VENV)/bin/mypy
	$(MAKE) --no-print-directory test

sweep: $(BUILD_STAMP) ## compile every image that any accepted configuration can need; hours, see docs/geometries.md
	$(BUILD_VENV)/bin/python scripts/sweep.py $(SWEEP_FLAGS)

format: $(TEST_STAMP) ## format the code and fix what can be fixed
	$(TEST_VENV)/bin/ruff format .
	$(TEST_VENV)/bin/ruff check --fix .

check-flavours: ## build with either and both compiler libraries, beside drivers of three ages: equal bytes; some five minutes
	$(call make-venv,$(FLAVOURS_VENV))
	$(FLAVOURS_VENV)/bin/python $(PIP_INSTALL) --editable '.[build]'
	$(FLAVOURS_VENV)/bin/python scripts/check_flavours.py

check-matrix: ## the tests on every Python that is installed, 3.10 to 3.13, and with the lowest versions of all dependencies; an hour
	$(PYTHON) scripts/check_matrix.py $(MATRIX_FLAGS)

test-gpu: ## check every variant of BUNDLE on this machine's GPU with GPU_PYTHON (torch and pytest, no compiler)
	ATTNRES_AOT_BUNDLE="$(BUNDLE)" $(GPU_PYTHON) -m pytest tests/gpu $(PYTEST_FLAGS)

stress-gpu: ## the stress tests on a GPU with full counts; see docs/stress.md
	ATTNRES_AOT_BUNDLE="$(BUNDLE)" $(GPU_PYTHON) -m pytest tests/gpu/test_stress.py --stress $(PYTEST_FLAGS)

measure: ## measure BUNDLE on this machine's GPU into the folder results; see docs/benchmarks.md
	GPU_PYTHON="$(GPU_PYTHON)" scripts/measure.sh "$(BUNDLE)" results

clean: ## remove virtual environments, caches and built bundles
	rm -rf $(BUILD_VENV) $(TEST_VENV) $(FLAVOURS_VENV) .venv-matrix .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find artifacts -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so an interrupted install starts over; a change of pins installs again.
$(BUILD_STAMP): $(INSTALLED_BY)
	$(call make-venv,$(BUILD_VENV))
	$(BUILD_VENV)/bin/python $(PIP_INSTALL) --editable '.[build]'
	@touch $@

$(TEST_STAMP): $(INSTALLED_BY)
	$(call make-venv,$(TEST_VENV))
	$(TEST_VENV)/bin/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

define make-venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "attnres-aot needs Python 3.10 or later, \
	this is " + sys.version.split()[0] + "; choose another with: make PYTHON=python3.12 ...")'
@echo "setting up $(1) (first run only)" >&2
@$(PYTHON) -m venv $(1)
endef
