# make run     install what is missing, run what is stale, print the table
# make ui      the same graph in Prefect's pages
# make worker  run stages for runs of another host: docs/scheduling.md
# make serving-env         SGLang in an environment of its own; ENGINE=vllm: vLLM
# make test    every check and test; make test-long: whole runs
#
# After make run, .venv/bin/aerie --help lists every other command. Another Python: make run PYTHON=python3.12
# PyTorch for CPUs, a sixth of the download: make run TORCH=cpu; for a CUDA release: TORCH=cu130. Pip though uv is there: UV=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
TORCH ?=
UV ?= $(shell command -v uv)
# A file for each choice: with another TORCH torch is installed anew, without one whatever is there stays.
INSTALLED := $(VENV)/.installed$(TORCH:%=-torch-%)
SUPPORTED := import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
  "aerie: needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v)

.PHONY: run ui worker check test test-long clean serving-env

# A second run must be quick: no installer, one start of Python.
run: $(INSTALLED)
	@$(BIN)/python -m pipeline run

ui: $(INSTALLED)
	@$(IN_VENV) python -m pipeline.serve

# Works in the folder in which it is started.
WORKER_LIMIT ?= 1
worker: $(INSTALLED)
	@$(IN_VENV) python -m pipeline.start_worker --limit $(WORKER_LIMIT)

ENGINE ?= sglang
SERVING := serving-env/$(ENGINE)

# Environments of their own, never imported: their torch and transformers differ from this project's.
serving-env: $(SERVING)/.installed

$(SERVING)/.installed: serving-env/$(ENGINE).txt
	@test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	@echo "installing $(ENGINE) into $(SERVING): about 10 GB"
	@PIP_ROOT_USER_ACTION=ignore $(SERVING)/bin/python -m pip -q --disable-pip-version-check --no-input install -r $<
	@touch $@

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three on two cores: a third of the long files' time is waiting, for servers, workers and a browser.
test: check
	$(IN_VENV) pytest -n 3 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.installed-test
	$(IN_VENV) pytest -m long

# Removes caches and byte code; .venv, .scratch (unfinished training) and DVC's files stay.
clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "aerie: $(PYTHON) not found; name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)'
	@$(PYTHON) pipeline/install.py --torch "$(TORCH)" --uv "$(UV)"
	@rm -f $(VENV)/.installed-torch-*
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: $(INSTALLED)
	@$(PYTHON) pipeline/install.py --uv "$(UV)" --extra test
	@touch $@
