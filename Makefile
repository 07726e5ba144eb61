# The same targets serve people and the continuous integration.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench install clean

install: $(STAMP)

# Everything is resolved in one call. The constraints pin a CPU build of torch where the index has one; delete its
# line for CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (one to three minutes, about 1.5 GB) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip check
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/echo-coordinator demo

# One process for each core; the tests of a file stay together, since they share a swarm.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) runs/demo
