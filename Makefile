# The same targets serve people and the continuous integration.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LLAMA := $(VENV)/.llama-cpp

.PHONY: demo demo-mixed test test-backends check check-gpu bench install vllm-env clean

install: $(STAMP)

# Everything is resolved in one call. The constraints pin a CPU build of torch where the index has one; delete its
# line for CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (one to four minutes, about 1.5 GB) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip check
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/echo-coordinator demo

# The demo with a torch, a llama.cpp and a vLLM node; installs the last two.
demo-mixed: $(LLAMA) vllm-env
	$(BIN)/echo-coordinator demo --mixed --folder runs/demo-mixed

# One process for each core; the tests of a file stay together, since they share a swarm.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

# The samplers that `make install` leaves out, since llama.cpp compiles and vLLM is large.
test-backends: $(LLAMA) vllm-env
	$(BIN)/python -m pytest tests/backends

$(LLAMA): $(STAMP)
	@echo "Installing llama.cpp into $(VENV) (compiles for about ten minutes on two cores; pip keeps the result) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,llama-cpp]'
	@$(BIN)/python -m pip check
	@touch $(LLAMA)

# vLLM pins so much that it gets an environment of its own, .venv-vllm; does nothing when that is up to date.
vllm-env: $(STAMP)
	$(BIN)/python tools/make_vllm_env.py

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py

# Trainer and samplers on a CUDA device, in pieces of some minutes; called again, it goes on with what has not passed.
# VLLM_PYTHON names the interpreter of an environment with a CUDA build of vLLM.
check-gpu: $(STAMP)
	$(BIN)/python -m tools.check_gpu

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-vllm runs/demo runs/demo-mixed
