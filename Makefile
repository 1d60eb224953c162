# Everything runs in .venv, which the first target to need it creates; `quickstart` installs the
# package alone, all other targets what development takes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev

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

.PHONY: quickstart test check docs mutants fuzz hostile bench proof chaos soak clean

quickstart: $(READY)
	$(BIN)/tramontane train configs/quickstart.yaml

test: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in site/; to read it while writing: $(BIN)/mkdocs serve"

mutants: $(DEV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/mutmut run
	$(BIN)/mutmut results

fuzz: $(DEV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m fuzz --seconds $(SECONDS)

hostile: $(DEV)
	$(BIN)/python -m fuzz.hostile --programs $(PROGRAMS) $(if $(RUNG),--rung $(RUNG))

bench: $(DEV)
	$(BIN)/python -m benchmarks $(BENCH)

proof: $(DEV)
	$(BIN)/python benchmarks/curation_proof.py

chaos: $(DEV)
	$(BIN)/python -m chaos $(if $(SEED),--seed $(SEED))

soak: $(DEV)
	$(BIN)/python -m chaos.soak --minutes $(MINUTES) --kind $(KIND)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# What the tests, checks and benchmarks take, Ray and Reasoning Gym included.
$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis site mutants
