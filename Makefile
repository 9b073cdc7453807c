# `make demo` and `make test` work on a fresh machine with Python >= 3.10 and make.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check clean

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# torch first and by name: another package asking for just "torch" would bring a CUDA build.
$(VENV)/.ready-torch: pyproject.toml $(VENV)/.ready
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	touch $@

$(VENV)/.ready-dev: pyproject.toml $(VENV)/.ready-torch
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet 'ray>=2.40'  # has no wheel for every Python; its tests skip
	-$(BIN)/python -m pip install --quiet --no-deps 'megatron-core==0.16.1'  # its tests skip without
	-$(BIN)/python -m failslow.capture.native  # half a minute; without a compiler its tests skip
	touch $@

demo: $(VENV)/.ready-torch  ## train, hurt, notice, work around; writes failslow-demo.html
	$(BIN)/failslow demo

test: $(VENV)/.ready-dev  ## lint, types, tests: what CI runs
	scripts/install-test-tools
	failed=0; \
	PATH="$(abspath $(BIN)):$$PATH" scripts/check & check=$$!; \
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not live' || failed=1; \
	wait $$check || failed=1; \
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'live and not alone and not slow' || failed=1; \
	$(BIN)/python -m pytest -m 'alone and not slow' || failed=1; \
	exit $$failed

test-slow: $(VENV)/.ready-dev  ## the long tests only
	scripts/install-test-tools
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.ready-dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache failslow-demo.html
