# One command each: `make demo`, `make test`. Both first create .venv with everything they need.

VENV := .venv
BIN := $(VENV)/bin
FIND_PYTHON := for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done
PYTHON := $(shell $(FIND_PYTHON))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is stored even where the environment says otherwise: tests start hundreds of interpreters.
unexport PYTHONDONTWRITEBYTECODE

# $(call install,extras,minutes): pip's output goes to a log, of which the end is shown if it fails.
install = echo "installing shoal[$(1)] into $(VENV), about $(2) with a fast network ..."; \
	$(BIN)/python -m pip install -c constraints.txt -e ".[$(1)]" >$(VENV)/install.log 2>&1 \
	|| { tail -n 20 $(VENV)/install.log; echo "installation failed; all of its output: $(VENV)/install.log"; exit 1; }

.PHONY: help demo test test-long test-vllm lint style docs bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s  %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.dev  ## run a whole swarm, which learns, and say where the report is
	@$(BIN)/shoal demo

# Many tests wait as much as they compute: with two processes per core, no core is idle.
PYTEST := $(BIN)/python -m pytest -q -n $$(($$(getconf _NPROCESSORS_ONLN) * 2)) --dist=loadfile --no-loadscope-reorder

test: style  ## check style and run all tests
	@$(PYTEST)

test-long: $(VENV)/.dev  ## run the longer forms of some tests: more kills, attacks, databases, compilers
	@$(PYTEST) -m long

# vLLM's CPU build has an environment of its own, because its pins contradict ours.
VLLM := .venv-vllm
test-vllm: $(VLLM)/.stamp  ## run the tests that need vLLM, in an environment of their own
	@$(VLLM)/bin/python -m pytest -q tests/engine/test_vllm.py

$(VLLM)/.stamp: pyproject.toml requirements-vllm.txt
	@$(PYTHON) -m venv $(VLLM)
	@echo "installing shoal and vLLM into $(VLLM), about three minutes with a fast network ..."
	@$(VLLM)/bin/python -m pip install -q --no-deps -r requirements-vllm.txt -e .
	@touch $@

lint: style  ## check style and types
	@$(BIN)/mypy

style: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }

docs: $(VENV)/.docs  ## build the documentation site; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

bench: $(VENV)/.bench  ## measure against peers, side by side
	@$(BIN)/python bench/run.py

clean:  ## remove .venv, caches and build files; runs/ stays
	@rm -rf $(VENV) $(VLLM) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last: an installation that was cut off is made again.
$(VENV)/.dev: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "shoal needs Python 3.11 or newer, and none was found as python3.13, python3.12, python3.11 or python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed; some systems keep it in a package of its own, python3-venv"; exit 1; }
	@$(call install,dev,two minutes)
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(call install,dev$(comma)bench,three minutes)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(call install,dev$(comma)docs,one minute)
	@touch $@

comma := ,
