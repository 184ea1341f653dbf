# One command each; every target works on a fresh machine with Python >= 3.10 and a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Containers set it: then each of the tests' hundreds of processes would compile every module again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test proofs bench bench-gpu lint format clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

setup: $(STAMP)  ## create .venv with the pinned dependencies

# torch comes first: DeepSpeed's build looks for it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel --constraint constraints.txt
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

quickstart: setup  ## prepare a small real corpus, pretrain, evaluate, sample, export (about 5 minutes on 2 cores)
	$(BIN)/python launcher/quickstart.py

# More processes than cores: the first begins with the Slurm tests, and others wait for ranks that they have started
test: setup      ## the tests, by four processes for two cores; of long matrices a part
	$(BIN)/python -m pytest -m "not proof" --numprocesses 4 --dist loadfile --no-loadscope-reorder

proofs: setup    ## the rest of those matrices: every ZeRO stage, launcher and kind (tests/proofs.txt)
	$(BIN)/python -m pytest -m proof --numprocesses 3 --dist loadfile --no-loadscope-reorder

bench: setup     ## how fast this machine trains, against plain loops and other libraries: bench/README.md
	$(BIN)/python tests/benchmarks/bench.py

bench-gpu: setup ## the same at the sizes of one GPU, ten minutes a call; again for what is missing: bench/gpu/README.md
	$(BIN)/python tests/benchmarks/bench.py --gpu --minutes 10 --output bench/gpu

lint: setup      ## formatting, rules, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p .mypy_path && ln -sfn .. .mypy_path/plumbline
	$(BIN)/mypy

format: setup    ## apply formatting and the rules that can fix themselves
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove the environment and caches (never corpora/ or runs/)
	rm -rf $(VENV) .mypy_cache .mypy_path .pytest_cache .ruff_cache .hypothesis *.egg-info
