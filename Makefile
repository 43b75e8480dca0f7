# `make report` and `make test` need Python 3.11 or later and nothing else: they make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REPORTS := $(VENV)/.reports
READY := $(VENV)/.ready
WORKERS ?= 2
HEALTHY ?= examples/digits/healthy.py
BROKEN ?= examples/digits/unused_head.py
# Bytecode is kept whatever the environment says: otherwise each rank that imports a test module compiles it anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15 --durations-min=0.5
PICTURE := examples/language_model/frozen_by_no_grad.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help report test tests-of-a-change test-all test-exhaustive test-frameworks test-launchers test-gpu lint types format faults schemas scripts models bench bench-quick docs pictures dist test-torch clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# pip older than 25.1 does not know --group, and a fresh virtual environment often brings one.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
# pip compiles on one core, and the tests of packages as well. What cannot be compiled are templates.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true

$(REPORTS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ddpcheck needs Python 3.11 or later; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(INSTALL) --group report
	$(COMPILE)
	@touch $@

$(READY): $(REPORTS)
	$(INSTALL) --group dev
	$(COMPILE)
	@touch $@

report: $(REPORTS) ## a report on a healthy model, then one on its broken twin
	@echo '== a healthy model: $(HEALTHY)'
	$(BIN)/ddpcheck report $(HEALTHY)
	@echo
	@echo '== its broken twin: $(BROKEN)'
	$(BIN)/ddpcheck report $(BROKEN) || test $$? -eq 1

# Types are checked on one core while the tests begin on the other.
test: $(READY) ## what protects a change: lint, types, each door and each rule; 5 minutes on two cores, needs no GPU
	$(BIN)/python -m compileall -q ddpcheck tests examples
	$(MAKE) --no-print-directory -j 2 lint types tests-of-a-change

tests-of-a-change: $(READY)
	$(PYTEST)

# `make test` runs what has no mark, or `smoke`; this runs the rest. tests/tiers.py says what the marks mean.
test-all: $(READY) ## the tests that `make test` leaves out: a share of the faults, twins and models, frameworks, launchers; half an hour
	$(BIN)/python -m tests.launchers.install
	$(PYTEST) -m "(slow or launchers) and not (smoke or exhaustive)"

test-exhaustive: $(READY) ## every case of every test that `make test` leaves out; hours
	$(BIN)/python -m tests.launchers.install
	EVERY_CASE=1 $(PYTEST) -m "slow or launchers or exhaustive"

test-frameworks: $(READY) ## all tests of mmengine, Lightning, transformers and accelerate
	$(PYTEST) -m "not launchers" tests/integrations

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

format: $(READY) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models: $(READY) ## every architecture of docs/models.md, checked and held against an oracle
	$(BIN)/python -m tests.models

faults: $(READY) ## run every fault of examples/faults; write docs/faults.md, the README's comparison and tests/evidence
	$(BIN)/python -m tests.faultsuite

schemas: $(READY) ## the JSON Schemas of docs/schemas, from the dataclasses
	mkdir -p docs/schemas
	for document in report matrix difference; do \
		$(BIN)/ddpcheck schema $$document > docs/schemas/$$document.schema.json; done

scripts: $(READY) ## run every script of examples/scripts under torchrun and under ddpcheck run; write docs/scripts.md
	$(BIN)/python -m tests.faultsuite.scripts_page

# Test harnesses of torch need a package that nothing else here does. For a look: `python -m benchmarks.harnesses --quick`.
bench: $(READY) ## what a distributed test, a step of the wrapper, a report, a run, the memory of a check and many ranks cost, into docs/; on an idle machine
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group bench
	$(BIN)/python -m benchmarks.harnesses --write
	$(BIN)/python -m benchmarks.wrapper --write
	$(BIN)/python benchmarks/report.py --write
	$(BIN)/python benchmarks/run.py --write
	$(BIN)/python benchmarks/memory.py --write
	$(BIN)/python benchmarks/scale.py --write

bench-quick: $(READY) ## the same in about a minute, to the terminal: shows a cost that has grown much, no figures to quote
	@echo '== one round of each: rough figures, to see a cost that has grown much; compare the ratios, and quote none'
	$(BIN)/python -m benchmarks.harnesses --quick --ranks 2 --only forked worlds fixture spawned
	$(BIN)/python -m benchmarks.wrapper --quick
	$(BIN)/python benchmarks/report.py --quick
	$(BIN)/python benchmarks/run.py --quick

docs: $(READY) ## the documentation as HTML, into build/docs; warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs build/docs

# A test holds docs/graph.dot to what ddpcheck draws; docs/graph.svg, laid out by Graphviz, is made of it.
pictures: $(READY) ## draw the pictures of the documentation afresh; needs Graphviz
	$(BIN)/ddpcheck graph $(PICTURE) -o docs/graph.dot
	$(BIN)/ddpcheck graph $(PICTURE) -o docs/graph.svg

# For a machine with one GPU, no network and a torch of its own: no virtual environment, nothing is installed. Only files
# that hold GPU tests are read, so that what the others need may be missing.
test-gpu: ## the tests that need a CUDA device, with the torch of $(PYTHON)
	PYTHONPATH=. $(PYTHON) -m pytest -p ddpcheck.pytest_plugin -m gpu $$(grep -rl 'mark.gpu' --include 'test_*.py' tests)

# Debian's packages of Open MPI, SLURM and munge are installed where this is root; without, those tests are skipped. SLURM
# runs from a temporary folder, at ports of its own, and is stopped again.
test-launchers: $(READY) ## the tests of real launchers: torchrun, Open MPI and SLURM, on one node and on two
	$(BIN)/python -m tests.launchers.install
	$(PYTEST) -m launchers $$(grep -rl 'mark.launchers' --include 'test_*.py' tests)

dist: $(READY) ## the wheel and the sdist of a release, into dist/, each tried in an empty environment
	$(INSTALL) --group release
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m tests.distribution dist

# PyPI's torch brings the libraries of CUDA, 5 GB, and works without a device; pip's own settings may name another index.
test-torch: ## the tests of `make test` with another torch: make test-torch VERSION=2.4.1, in an environment of its own
	test -x .venv-$(VERSION)/bin/python || $(PYTHON) -m venv .venv-$(VERSION)
	.venv-$(VERSION)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	sed '/^torch==/d' constraints.txt > .venv-$(VERSION)/constraints.txt
	.venv-$(VERSION)/bin/python -m pip install --quiet --constraint .venv-$(VERSION)/constraints.txt torch==$(VERSION) --editable . --group test
	$(MAKE) --no-print-directory VENV=.venv-$(VERSION) READY= tests-of-a-change

clean: ## remove everything that make made
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
