# make run     install what is missing, run what is stale, print the table
# make ui      the same graph in Prefect's pages
# make worker  run stages for runs of another host: docs/scheduling.md
# make serving-env         SGLang in an environment of its own; ENGINE=vllm: vLLM
# make test    every check and test; make test-long: whole runs
#
# After make run, .venv/bin/aerie --help lists every other command. Another Python: make run PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
SUPPORTED := import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
  "aerie: needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v)

.PHONY: run ui worker check test test-long clean serving-env

# A second run must be quick: no pip, and the table only if the report stage has not printed it.
run: $(VENV)/.installed
	@$(BIN)/python -m stages.params.schema
	@touch $(VENV)/.started
	@$(BIN)/python -m pipeline run
	@echo; if test results/report/index.html -nt $(VENV)/.started; then echo "the table is above; the page is results/report/index.html"; \
	  else $(BIN)/python -m stages.report --table; fi

ui: $(VENV)/.installed
	@$(IN_VENV) python -m pipeline.serve

# Works in the folder in which it is started.
WORKER_LIMIT ?= 1
worker: $(VENV)/.installed
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

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "aerie: $(PYTHON) not found; name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): minutes the first time, and once more when pyproject.toml or constraints.txt change"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@
