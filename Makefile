# Every target creates the .venv that it needs on first use. `make` alone lists the targets.
#
#   ARGS    extra arguments for the tool of a target, e.g. make test ARGS="-k tree"
#   PYTHON  the interpreter for a new .venv (3.11 to 3.14; found automatically by default)
#   TORCH   pip's arguments to install torch into a .venv without it (default: see scripts/make_venv.sh)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

BIN := .venv/bin
export PYTHON TORCH
# Tests start hundreds of processes, each of which would compile the package's sources again.
unexport PYTHONDONTWRITEBYTECODE

# QUICK: what `make quick` runs. NOT_QUICK: files of those folders that take five seconds or more, and so run only in
# `make test` (the decode step's is an exception).
QUICK := tests/test_architecture.py tests/test_architecture_picture.py tests/test_public_api.py tests/test_engine.py \
	tests/cache tests/mtp tests/replay tests/runtime tests/text \
	$(patsubst %,tests/server/test_%.py,chat completions front names tenants)
NOT_QUICK := tests/mtp/test_window_copies.py \
	$(patsubst %,tests/cache/test_%.py,cost random) \
	$(patsubst %,tests/replay/test_%.py,forced render) \
	$(patsubst %,tests/runtime/test_%.py,decode_step decode_step_distribution grammar grammar_expressions grammar_limits \
		graphs prefill_graphs ride) \
	$(patsubst %,tests/text/test_%.py,bounded_memory continued prompt_encoder remembered_prompts segmenter sentinels \
		system_messages token_limit)

.PHONY: help install replay evaluate quick test test-sdks test-clients aiperf test-gpu chaos sanitize check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.dev-installed  ## make the .venv with everything that developers need

replay: .venv/.installed  ## replay workloads/agentic.jsonl on the bundled model, tiny-agent
	$(BIN)/agentspec replay workloads/agentic.jsonl $(ARGS)

evaluate: .venv/.installed  ## measure tiny-agent on sessions that its training never saw
	$(BIN)/python -m scripts.tiny_agent.evaluate $(ARGS)

quick: .venv/.dev-installed  ## the loop beside an editor, under a minute on two cores: format, lint, rules, and the shorter tests without kernels
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 -m "not gpu" $(QUICK) $(addprefix --ignore=,$(NOT_QUICK)) $(ARGS)

test: .venv/.dev-installed  ## run every test that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" --ignore=tests/gpu --ignore=tests/sdks --durations=10 $(ARGS)

test-sdks: .venv/.dev-installed  ## install SDKs, agent frameworks and benchmark clients, and run each against the server; what can't be installed is skipped
	scripts/client_venv.sh sdks
	scripts/client_venv.sh benchmarks
	scripts/client_venv.sh guidellm
	scripts/client_node.sh
	$(BIN)/python -m pytest -n 2 -rs tests/sdks --durations=10 $(ARGS)

test-clients: .venv/.dev-installed  ## install command-line agents with npm and let each work against the server; what can't be installed is skipped
	$(BIN)/python -m scripts.clients.install
	$(BIN)/python -m pytest -rsxP tests/frameworks/test_command_line_agents.py $(ARGS)

aiperf: .venv/.dev-installed  ## make .venv-aiperf, where aiperf's test finds its client; where that can't be done, the test is skipped
	scripts/client_venv.sh aiperf

test-gpu: .venv/.dev-installed  ## run the tests that need a CUDA device, and those of the kernels on it
	$(BIN)/python -m pytest tests/gpu tests/kernels/triton $(ARGS)

chaos: .venv/.dev-installed  ## attack servers for half an hour: clients that leave, huge bodies, kills; says how far a server falls behind
	$(BIN)/python -m tests.chaos.run $(ARGS)

sanitize: .venv/.dev-installed  ## watch prompts, decode steps and exchanges on a CUDA device with compute-sanitizer: memory errors and races
	scripts/sanitize.sh $(BIN)/python

check: .venv/.dev-installed  ## check format, lint, types, architecture, and that every kernel compiles for the GPUs that launch it
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/python -m tests.kernels.triton.compile_kernels

format: .venv/.dev-installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what was built, but keep the .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find agentspec tests workloads benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml scripts/make_venv.sh
	scripts/make_venv.sh

.venv/.dev-installed: pyproject.toml scripts/make_venv.sh
	scripts/make_venv.sh dev
