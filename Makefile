# `make demo` and `make test` set up what they need in .venv; nothing else on the machine is touched.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from. Where there is no GPU,
# pip also looks at torch's own index of CPU builds: of one version pip prefers 2.13.0+cpu to 2.13.0, the build
# with CUDA and its gigabytes. An index that cannot be reached costs a warning. CPU_BUILDS= turns this off.

PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2
CAMPAIGN_ARGS ?= 200 0
MUTANTS_ARGS ?= 25 0
PROOFS_ARGS ?=
GPU_ARGS ?=
GPU_PYTHON ?=
PACK_ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
CPU_BUILDS ?= https://download.pytorch.org/whl/cpu
INSTALLED := .venv/installed
READY := .venv/ready
ORACLES := .venv/oracles
# torch's build for CUDA, as machines with GPUs have it: it can be imported, and compile, without one.
CUDA_TORCH ?= 2.11.0
CUDA_BIN := .venv-cuda/bin
CUDA_READY := .venv-cuda/ready

# Tests start hundreds of processes: none compiles again what the one before it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test docs release golden proofs gpu gpu-pack offline-gpu campaign oracles lint format clean

help:
	@echo "make demo    pretrain a small model on 4 local ranks      (DEMO_ARGS=\"train.steps=20\" changes the run)"
	@echo "make test    run the tests in WORKERS=2 processes         (TEST_ARGS=\"-k lr\" goes to pytest)"
	@echo "make docs    build the documentation site in build/site; a link that leads nowhere is an error"
	@echo "make release build and check the wheel and the source distribution, and run the demo from each in a fresh environment"
	@echo "make golden  follow a published learning curve to four digits, and write docs/reproduced.md  (TEXT=input.txt: its text)"
	@echo "make proofs  run the proofs behind the README, and write docs/proofs: an hour  (PROOFS_ARGS=\"resume\": one of them)"
	@echo "make gpu     run all that needs a GPU, and write docs/gpu.md  (GPU_PYTHON=python3: with the packages that are there)"
	@echo "make gpu-pack  pack what a machine with torch and a GPU lacks and cannot download, and say what to run there  (PACK_ARGS=\"--python 3.12\")"
	@echo "make offline-gpu  check without a GPU what torch's build for CUDA makes of the code: machine code, its numbers"
	@echo "make campaign  run all of what tests only sample: hours  (CAMPAIGN_ARGS=\"50 1000\": 50 parity runs from seed 1000 on; MUTANTS_ARGS=\"25 7\": 25 mutants of seed 7)"
	@echo "make oracles install megatron-core, torchtitan, lm-eval and transformers 4, which tests compare with and are skipped without"
	@echo "make lint    check style and types"
	@echo "make format  put the code in its standard format"
	@echo "make clean   remove the virtual environment and caches, keep runs"

demo: $(INSTALLED)
	$(BIN)/megaprec train examples/demo.toml $(DEMO_ARGS)

test: $(READY)
	$(PYTEST) $(TEST_ARGS)

docs: $(READY)
	$(BIN)/python -m website

# Each distribution is installed in an environment of its own and started outside of the clone. Without a GPU torch is the
# build for CPUs, as above.
RELEASE_FOLDER := build/release
release: $(READY)
	$(PIP) -e ".[release]"
	rm -rf dist $(RELEASE_FOLDER)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	for file in dist/*.whl dist/*.tar.gz; do \
	    rm -rf $(RELEASE_FOLDER) && mkdir -p $(RELEASE_FOLDER) && cp examples/demo.toml $(RELEASE_FOLDER) && \
	    $(PYTHON) -m venv $(RELEASE_FOLDER)/venv && \
	    $(RELEASE_FOLDER)/venv/bin/python -m pip install --quiet --no-compile -c constraints.txt $(FIND_CPU_BUILD) $$file && \
	    (cd $(RELEASE_FOLDER) && venv/bin/megaprec train demo.toml train.steps=20 log.plot=false) || exit 1; \
	done

golden: $(READY)
	$(BIN)/python -m tests.golden --text "$(TEXT)" --page docs/reproduced.md --plot docs/reproduced.png

proofs: $(READY)
	$(BIN)/python -m tests.proofs $(PROOFS_ARGS)

gpu:
	@nvidia-smi -L > /dev/null 2>&1 || { echo "no GPU here: nothing was run, and docs/gpu.md is as it was" >&2; exit 2; }
	@test -n "$(GPU_PYTHON)" || $(MAKE) --no-print-directory $(READY)
	$(or $(GPU_PYTHON),$(BIN)/python) -m tools.bench gpu $(GPU_ARGS)

gpu-pack:
	$(PYTHON) tools/bench/pack.py $(PACK_ARGS)

offline-gpu: $(CUDA_READY)
	$(CUDA_BIN)/python -m pytest -m campaign tests/offline_gpu/test_operators.py tests/offline_gpu/test_machine_code.py tests/offline_gpu/test_groups.py
	TRITON_INTERPRET=1 $(CUDA_BIN)/python -m pytest -m campaign tests/offline_gpu/test_interpreted.py tests/offline_gpu/test_recurrent_kernels.py

campaign: $(READY)
	$(PYTEST) -m campaign
	$(BIN)/python -m tests.parity.campaign $(CAMPAIGN_ARGS)
	$(BIN)/python -m tests.parity.bisected
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

oracles: $(ORACLES)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-cuda .pytest_cache .ruff_cache .hypothesis *.egg-info build dist

# torch first and alone, so that nothing that depends on it chooses another version, and so that the CPU builds' index,
# which is asked briefly, is asked for torch alone. Modules are compiled when they are first imported.
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
FIND_CPU_BUILD := $(if $(CPU_BUILDS),--extra-index-url $(CPU_BUILDS) --retries 0 --timeout 15)

$(INSTALLED): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	if nvidia-smi -L > /dev/null 2>&1; then $(PIP) --no-deps torch; \
	else $(PIP) --no-deps $(FIND_CPU_BUILD) torch || $(PIP) --no-deps torch; fi
	$(PIP) -e ".[plots]"
	touch $@

$(READY): $(INSTALLED)
	$(PIP) -e ".[test]"
	touch $@

# Triton's interpreter fails with newer versions of numpy.
$(CUDA_READY): setup.py
	$(PYTHON) -m venv .venv-cuda
	$(CUDA_BIN)/python -m pip install --quiet --no-compile torch==$(CUDA_TORCH) "numpy<2.4" -e . "pytest>=9,<10" "hypothesis<7" "fla-core>=0.5"
	touch $@

# torch is there by now, and stays the build that it is. Transformers 4 has a folder of its own beside the 5 of all else.
# So has torchtitan with what it wants of other versions than all else; it takes 1 GB, most of it Triton.
OLDER := .venv/transformers4
TORCHTITAN := .venv/torchtitan
$(ORACLES): $(READY) tests/convert/transformers4.txt tests/convert/torchtitan.txt
	$(PIP) -e ".[oracles]"
	rm -rf $(OLDER)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(OLDER) -r tests/convert/transformers4.txt
	rm -rf $(TORCHTITAN)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(TORCHTITAN) -r tests/convert/torchtitan.txt
	touch $@
