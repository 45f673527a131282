# Two entry points for a fresh machine: `make demo` runs the main job, `make test` the whole suite.
# Both make their own virtual environment in .venv and install what they need.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[eval,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/python eval/demo.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: $(STAMP) lint
	$(VENV)/bin/python -m pytest -q

clean:
	rm -rf $(VENV) build dist *.egg-info
