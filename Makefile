# `make demo` and `make test` set up what they need in .venv; nothing else on the machine is touched.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) decide where packages come from, and so
# whether torch is a CPU or a CUDA build of the pinned version.

PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2
CAMPAIGN_ARGS ?= 200 0
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
READY := .venv/ready
ORACLES := .venv/oracles

# Tests start hundreds of processes: none compiles again what the one before it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test campaign oracles lint format clean

help:
	@echo "make demo    pretrain a small model on 4 local ranks      (DEMO_ARGS=\"train.steps=20\" changes the run)"
	@echo "make test    run the tests in WORKERS=2 processes         (TEST_ARGS=\"-k lr\" goes to pytest)"
	@echo "make campaign  run all of what tests only sample: hours  (CAMPAIGN_ARGS=\"50 1000\": 50 parity runs from seed 1000 on)"
	@echo "make oracles install megatron-core and lm-eval, which tests compare with and are skipped without"
	@echo "make lint    check style and types"
	@echo "make format  put the code in its standard format"
	@echo "make clean   remove the virtual environment and caches, keep runs"

demo: $(READY)
	$(BIN)/megaprec train examples/demo.toml $(DEMO_ARGS)

test: $(READY)
	$(PYTEST) $(TEST_ARGS)

campaign: $(READY)
	$(PYTEST) -m campaign
	$(BIN)/python -m tests.parity.campaign $(CAMPAIGN_ARGS)

oracles: $(ORACLES)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis *.egg-info build dist

# torch first and alone: nothing that depends on it may choose another version.
$(READY): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

# torch is there by now, and stays the build that it is.
$(ORACLES): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[oracles]"
	touch $@
