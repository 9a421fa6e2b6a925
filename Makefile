# Every target makes its own virtual environment first. `make demo BACKEND=cuda` takes mlx for CUDA.
PYTHON  ?= python3
VENV    ?= .venv
BACKEND ?= $(if $(filter Darwin,$(shell uname -s)),metal,cpu)
BIN     := $(VENV)/bin

extra = $(if $(filter metal,$(BACKEND)),,$(BACKEND))
comma := ,

.PHONY: demo rescue test test-full check format bench browser clean

demo: $(VENV)/core
	$(BIN)/python -m mlx_tq demo

rescue: $(VENV)/rescue
	$(BIN)/mlx-tq-rescue serve

test test-full: $(VENV)/model

test: $(VENV)/dev
	$(BIN)/python -m pytest -m "not full"

test-full: $(VENV)/dev
	$(BIN)/python -m pytest

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev
	$(BIN)/python -m mlx_tq bench

# The page's tests drive the system's Chromium; without one they skip and say so.
browser:
	command -v chromium || apt-get install --yes chromium

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

$(VENV)/rescue: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$(if $(extra),$(extra)$(comma))server]'
	touch $@

# The real MiniLM for the tests that need it. Where torch would bring gigabytes of CUDA it is left out; they skip and say so.
TORCH := torch==2.13.0
$(VENV)/model: $(VENV)/dev
	if $(BIN)/python -m pip install --quiet --dry-run --report - '$(TORCH)' | grep -q '"name": "nvidia'; \
	then echo 'MiniLM is left out of the tests: pip would take torch with CUDA; install a CPU build of torch first'; \
	else $(BIN)/python -m pip install --quiet '$(TORCH)' && $(BIN)/python -m pip install --quiet --editable '.[embed-offline]'; fi
	touch $@
