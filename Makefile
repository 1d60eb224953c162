# Everything runs in .venv, which the first target to need it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# How long `make fuzz` runs; what `make hostile` tries.
SECONDS ?= 3600
PROGRAMS ?= 1000
RUNG ?=
# How long `make soak` runs, and where the workers are: ray or thread.
MINUTES ?= 60
KIND ?= ray
# What `make chaos` draws from; a seed of its own by default.
SEED ?=
# Which benchmarks `make bench` runs; all by default.
BENCH ?=

.PHONY: quickstart test check fuzz hostile bench proof chaos soak clean

quickstart: $(READY)
	$(BIN)/tramontane train configs/quickstart.yaml

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m fuzz --seconds $(SECONDS)

hostile: $(READY)
	$(BIN)/python -m fuzz.hostile --programs $(PROGRAMS) $(if $(RUNG),--rung $(RUNG))

bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m benchmarks $(BENCH)

proof: $(READY)
	$(BIN)/python benchmarks/curation_proof.py

chaos: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m chaos $(if $(SEED),--seed $(SEED))

soak: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m chaos.soak --minutes $(MINUTES) --kind $(KIND)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
