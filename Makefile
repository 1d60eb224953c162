# Everything runs in .venv, which is created when first needed. `quickstart` installs only the
# package, all other targets also install the development dependencies.
PYTHON ?= python3
# On Linux, the torch of most package indexes brings CUDA: gigabytes that are of no use without an
# NVIDIA driver. Without one, the version +cpu is required, which only builds for CPUs have. PyPI's
# build, for CUDA 13, needs driver 580; +cu126 is the one for older drivers.
# Another build: install it into .venv first, where it stays, or name it: make TORCH=torch==2.13.0
CUDA := $(shell command -v nvidia-smi)
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -c 3)
BUILD := $(if $(CUDA),$(if $(filter 4% 50% 51% 52% 53% 54% 55% 56% 57%,$(DRIVER)),+cu126),+cpu)
TORCH ?= torch==2.13.0$(BUILD)
TORCH_INDEX := https://download.pytorch.org/whl/$(lastword $(subst +, ,$(TORCH)))
comma := ,
VENV := .venv
BIN := $(VENV)/bin
# Without what Python keeps of compiled modules, each process of the tests compiles them again.
unexport PYTHONDONTWRITEBYTECODE
# uv takes less than half of pip's time. A mirror of the package index is named by UV_DEFAULT_INDEX.
export UV_SYSTEM_CERTS := 1
PIP := $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --constraint constraints.txt
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadgroup \
	--no-loadscope-reorder

PAPERS := papers/oversight papers/representation

# Duration of `make fuzz`; number of programs and rung of `make hostile`.
SECONDS ?= 3600
PROGRAMS ?= 1000
RUNG ?=
# Duration of `make soak`, and its placement: ray or thread.
MINUTES ?= 60
KIND ?= ray
# Generators of `make chaos` and `make soak`: slots or vllm (after `make vllm`).
GENERATOR ?= slots
# Of `make chaos`: CONVERSATIONS=1 makes each completion a conversation.
CONVERSATIONS ?=
# Seed of `make chaos`, `make ranks`, `make real` and `make real-tools`; by default the config's own.
SEED ?=
# Problems of GSM8K that `make real` reports: a file, or a Hugging Face dataset.
GSM8K ?= $(firstword $(wildcard ../shared/data/gsm8k_test.jsonl.gz) openai/gsm8k\#main)
# Benchmarks that `make bench` runs; all by default.
BENCH ?=
# Of `make gpu`: parts (all by default); AGAIN=1 measures them from the start, TINY=1 rehearses.
PART ?=
AGAIN ?=
TINY ?=

.PHONY: quickstart real real-tools test slow studies-smoke vllm adapters check types style links docs everything mutants fuzz hostile bench gpu proof chaos ranks nodes soak lock dist clean

quickstart: $(READY)
	$(BIN)/tramontane train configs/quickstart.yaml

real: $(READY)
	$(PIP) --quiet --editable '.[gguf]'
	$(BIN)/tramontane fetch smollm2
	$(BIN)/tramontane train configs/real.yaml evaluation.also.gsm8k.source='$(GSM8K)' \
		$(if $(SEED),seed=$(SEED))

real-tools: $(READY)
	$(PIP) --quiet --editable '.[gguf]'
	$(BIN)/tramontane fetch smollm2
	$(BIN)/tramontane train configs/real_tools.yaml $(if $(SEED),seed=$(SEED))

test: $(DEV)
	$(PYTEST) -m 'not slow'

slow: $(DEV)
	$(PYTEST) -m slow $$(grep -rl --include='test_*.py' 'mark\.slow' tests papers)

# All tests, with what Debian and the package index have of what some of them need. Needs root where
# one of the Debian packages is missing. What is skipped then needs a GPU, or a person.
DEBIAN := bubblewrap chromium g++ zsh
everything: $(DEV)
	dpkg --status $(DEBIAN) > $(VENV)/debian.log 2>&1 || apt-get install --yes --no-install-recommends $(DEBIAN)
	$(MAKE) test slow adapters vllm

# Every arm of every study for two updates; fails if one does.
studies-smoke: $(DEV)
	rm -rf $(VENV)/studies-smoke
	$(BIN)/tramontane study --smoke --report --out $(VENV)/studies-smoke \
		--page $(VENV)/studies-smoke/reproduction.md

# vLLM's environment, .venv-vllm (or that of TRAMONTANE_VLLM_PYTHON), and the tests that use it.
vllm: $(DEV)
	$(if $(TRAMONTANE_VLLM_PYTHON),,$(BIN)/tramontane vllm)
	$(BIN)/python -m pytest -m vllm

# Tests against packages that have adapters or read checkpoints, in environments that see .venv's:
# OpenEnv and verifiers need different versions of the same packages.
adapters: $(DEV)
	$(call above,.venv-adapters,$(ADAPTED) openai trl 'lm_eval[hf]' inspect-ai)
	.venv-adapters/bin/$(UNSKIPPED) tests/environments/test_adapters.py tests/docs/test_publish.py \
		tests/environments/test_mistral.py tests/environments/test_mistral_images.py \
		tests/verdicts/test_adapters.py tests/examples/test_gallery.py \
		-k '(adapters or mistral or openai or harness or lm_eval or trl_script) and not verifiers and not verl'
	.venv-adapters/bin/python -m benchmarks.chat_templates
	$(call above,.venv-verifiers,'.[verifiers]')
	.venv-verifiers/bin/$(UNSKIPPED) tests/verifier/test_tasksets.py tests/verdicts/test_adapters.py \
		-k 'tasksets or verifiers'

ADAPTED := '.[textarena,gymnasium,skyrl,openenv,mistral]'
SITE := python -c 'import site; print(site.getsitepackages()[0])'
define above
$(BIN)/python -m venv $(1)
echo "import site; site.addsitedir('$$($(BIN)/$(SITE))')" > "$$($(1)/bin/$(SITE))/dev.pth"
$(1)/bin/python -m pip install --quiet --constraint constraints.txt --editable $(2)
endef
UNSKIPPED := python -m pytest --no-skips -m 'not vllm' tests/evaluation/test_serving.py \
	tests/run/test_conversations.py

check: $(DEV)
	$(MAKE) --jobs=2 --output-sync --no-print-directory types style links

types style links: $(DEV)

types:
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z | xargs -0 $(BIN)/codespell

links:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(VENV)/site

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in site/; its search needs a server: $(BIN)/python -m http.server --directory site"

mutants: $(DEV)
	$(PIP) --quiet --editable '.[mutants]'
	$(BIN)/mutmut run
	$(BIN)/mutmut results

fuzz: $(DEV)
	$(PIP) --quiet --editable '.[fuzz]'
	$(BIN)/python -m fuzz --seconds $(SECONDS)

hostile: $(DEV)
	$(BIN)/python -m fuzz.hostile --programs $(PROGRAMS) $(if $(RUNG),--rung $(RUNG))
	$(BIN)/python -m fuzz.conversations
	$(BIN)/python -m fuzz.clients

bench: $(DEV)
	$(BIN)/python -m benchmarks $(BENCH)

# Figures of one GPU, for docs/gpu.md; a rehearsal leaves its page in .venv/gpu-rehearsal.
gpu: $(DEV)
	$(BIN)/python -m benchmarks.gpu $(PART) $(if $(AGAIN),--again) \
		$(if $(TINY),--tiny --out $(VENV)/gpu-rehearsal)

proof: $(DEV)
	$(BIN)/python benchmarks/curation_proof.py

chaos: $(DEV)
	$(BIN)/python -m chaos --generator $(GENERATOR) $(if $(SEED),--seed $(SEED)) \
		$(if $(CONVERSATIONS),--conversations)

ranks: $(DEV)
	$(BIN)/python -m chaos.ranks $(if $(SEED),--seed $(SEED))

# Needs root, to make machines of Linux namespaces.
nodes: $(DEV)
	$(PIP) --quiet --editable '.[nodes]'
	$(BIN)/python -m chaos.nodes

soak: $(DEV)
	$(BIN)/python -m chaos.soak --minutes $(MINUTES) --kind $(KIND) --generator $(GENERATOR)

# The versions of everything but torch, for every Python from 3.10 on; needs the package index.
LOCK := \# Every package of the extra dev but torch, whose build depends on the machine: made by `make lock`.
lock: $(DEV)
	echo "torch; python_version < '3'" > $(VENV)/no-torch.txt
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.10 --extra dev \
		--constraint constraints.txt --override $(VENV)/no-torch.txt --upgrade --no-annotate \
		--no-emit-index-url --no-header --output-file requirements.lock
	sed -i '1i $(LOCK)' requirements.lock

# Wheel and sdist in dist/, both tried in clean environments of the Pythons that uv finds or fetches.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
dist: $(DEV)
	rm -rf dist
	$(BIN)/uv build --out-dir dist
	for version in $(PYTHONS); do for package in dist/*.whl dist/*.tar.gz; do \
		$(BIN)/uv venv --quiet --clear --python $$version $(VENV)/clean || exit 1; \
		$(BIN)/uv pip install --quiet --python $(VENV)/clean --constraint requirements.lock $$package || exit 1; \
		$(VENV)/clean/bin/tramontane --version || exit 1; \
		$(VENV)/clean/bin/tramontane verify 0.5 1/2 || exit 1; \
	done; done

$(READY): pyproject.toml constraints.txt
	@echo "Installing Tramontane and 70 packages into $(VENV), with $(TORCH): $(if $(CUDA),an NVIDIA \
	driver was found; several GB with CUDA$(comma) 10 minutes or more,no NVIDIA driver was found; \
	0.4 GB to download$(comma) 1.7 GB on disk$(comma) a few minutes)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --no-deps '$(TORCH)' \
		$(if $(findstring +,$(TORCH)),--timeout 30 --retries 2 --extra-index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet uv
	$(PIP) --editable '.[train]'
	touch $@

# Dependencies of tests, checks and benchmarks, including Ray and Reasoning Gym, and the papers.
$(DEV): $(READY) $(PAPERS:%=%/pyproject.toml)
	@echo "Installing what tests, checks and benchmarks need into $(VENV): 0.9 GB more on disk."
	$(PIP) --editable '.[dev]' $(PAPERS:%=--editable ./%)
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis site mutants
