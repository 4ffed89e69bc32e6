# The doors. A fresh clone needs only make and Python 3.11 to 3.13.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.festina-installed
UP_FLAGS := $(if $(EMULATED),--emulated)

.PHONY: help setup setup-vllm up test test-systems test-resilience test-compose live-check consolidate-check gpu-check sim-soak paper lint compiled bench clean

help:  ## show this
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv and install Festina with its development tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}; set PYTHON=")'
	@echo "making $(VENV) (about half a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup-vllm: setup  ## make .venv-vllm, the environment of the CPU engine, and convert its model
	@$(BIN)/python -m services.local_sched.vllm_env --env .venv-vllm --models .festina/models \
		|| test $$? -eq 3

up: setup  ## start a pool here: 4 emulated H100, and vLLM on CPU (EMULATED=1 leaves that out)
	@$(BIN)/festina up $(UP_FLAGS)

test: setup setup-vllm  ## all tests: those of one process, then files of servers and pools two at a time, then what disturbs pools
	$(BIN)/python -m pytest -n auto tests/unit tests/property tests/sim
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/integration tests/e2e
	$(BIN)/python -m pytest tests/resilience

test-systems: setup  ## a live emulated pool under each of the systems in turn, about two minutes
	FESTINA_EVERY_SYSTEM=1 $(BIN)/python -m pytest -v tests/e2e/test_systems_pool.py

test-resilience: setup setup-vllm  ## kill, cut off and restart everything under load, for several minutes
	FESTINA_RESILIENCE_ROUNDS=10 FESTINA_FUZZ_S=60 $(BIN)/python -m pytest -v -s -m resilience tests/resilience \
		tests/integration/test_clock_guard.py tests/e2e/test_kv_moves_pool.py

test-compose: setup  ## build and start compose.yaml for real, where a Docker engine can run
	$(BIN)/python -m pytest -v -s -m compose --durations=5 --durations-min=1 tests/compose

sim-soak: setup  ## play thousands of random scenarios with faults in the simulator (SEEDS=0:2000 SYSTEM=festina)
	$(BIN)/python -m sim.soak --seeds $(or $(SEEDS),0:2000) --system $(or $(SYSTEM),festina)

live-check: setup  ## a live emulated pool beside the simulator, and beside fixed clocks: 2 x 10 minutes (MINUTES=2)
	$(BIN)/python -m sim.live_check --minutes $(or $(MINUTES),10)

consolidate-check: setup  ## a live emulated pool at full load, a tenth, full again, beside one that never consolidates: 2 x 9 minutes
	$(BIN)/python -m sim.consolidate_check --minutes $(or $(MINUTES),9)

paper: setup  ## the paper's evaluation beside its numbers: build/paper/index.html, 40 minutes (FULL=1: half a day; FIGURE=fig10: one of them)
	@if command -v gcc > /dev/null; then $(MAKE) --silent compiled; else echo "no gcc, so cells are played interpreted: half again as long"; fi
	$(BIN)/festina paper $(FIGURE) $(if $(FULL),--full)

.env:  ## compose's environment, with passwords made up at random
	@umask 077; $(PYTHON) -c 'import re, secrets, sys; print(re.sub("(?m)=change-me$$", lambda _: "=" + secrets.token_hex(16), sys.stdin.read()), end="")' < deploy/env.example > $@

gpu-check: setup  ## measure a real card, 8 minutes, results in build/ (ALLOW_CLOCKS=1 also sets its clock)
	@$(BIN)/python -m services.cli.gpu_check $(if $(filter 1,$(ALLOW_CLOCKS)),--allow-clocks)

lint: setup  ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_import_rules.py

compiled: build/compiled/.done  ## build/compiled: the packages with their hot modules compiled (needs gcc; a minute)

build/compiled/.done: deploy/compiled.py pyproject.toml $(shell find services shared sim -name '*.py') | setup
	@echo "compiling into build/compiled (about a minute)"
	@rm -rf build/compiled && mkdir -p build/compiled
	@cp -r services shared sim pyproject.toml README.md build/compiled
	@cp deploy/compiled.py build/compiled/setup.py
	@cd build/compiled && ../../$(BIN)/python setup.py --quiet build_ext --inplace
	@rm -rf build/compiled/build
	@touch $@
	@$(BIN)/python -m pytest -q tests/sim/test_compiled.py

bench: setup compiled  ## benchmarks; figures to build/bench.json (ONLY="gateway lut" for some)
	$(BIN)/python -m bench $(ONLY)

clean:  ## remove what was built
	rm -rf $(VENV) .venv-vllm .festina build
