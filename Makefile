# `make demo` and `make test` work on a fresh machine with Python >= 3.10 and make.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check bench clean

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready  ## find the fail-slows in the sample logs and write the picture
	$(BIN)/failslow analyze examples/logs --html failslow-demo.html

test: $(VENV)/.ready  ## lint, types, tests: what CI runs
	PATH="$(abspath $(BIN)):$$PATH" scripts/check
	$(BIN)/python -m pytest

test-slow: $(VENV)/.ready  ## the long tests only
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.ready
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache failslow-demo.html
