# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Minutes for `make mutations`, which goes on where it was stopped.
MINUTES ?= 45
# Workers for pytest: two, like the smallest machine this is developed on.
JOBS ?= 2

.PHONY: demo test test-slow golden mutations lines coverage wheel licences audit lint types install clean

demo: install  ## train, score, prune and report on scikit-learn's digits, into reports/demo (git ignores it)
	@$(BIN)/headprune demo
	@echo "The report is reports/demo/report.md; for a browser, reports/demo/report.html"

test: install  ## the tests that take minutes, not hours
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

test-slow: install  ## end-to-end runs, on minilm-rt too where it lies beside the checkout
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m slow

mutations: $(VENV)/.strength  ## what the tests say of small mistakes in planning, surgery and repair (CONTRIBUTING.md); up to MINUTES, then go on
	$(BIN)/python tools/mutations.py --minutes $(MINUTES)

lines: $(VENV)/.strength  ## how much of headprune the tests run, by file; twenty to forty minutes
	$(BIN)/python -m pytest -q -n $(JOBS) --cov=headprune --cov-report=term:skip-covered --cov-fail-under=92

coverage: install  ## every model type of transformers, against docs/coverage.md; about ten minutes
	$(BIN)/python benchmarks/coverage_types.py --check

golden: install  ## every result of tests/golden.json again, to the last bit on the machine that wrote it; three minutes on two cores
	$(BIN)/python tools/golden.py compare --only minilm & large=$$!; \
	$(BIN)/python tools/golden.py compare --only gpt2 llama t5 d2l "older folders" demo && wait $$large

wheel: install  ## what `pip install headprune` will install, built and tried apart from the checkout
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -m venv dist/venv
	dist/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cp -r reports/digits dist/run
	cd dist && PYTHONPATH=$$(../$(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])") venv/bin/headprune report run
	cmp dist/run/report.md reports/digits/report.md
	test -s dist/run/report.html

licences: install  ## docs/licences.md again, from the metadata of the pinned packages
	$(BIN)/python tools/licences.py

audit:  ## known holes of the pinned packages, by pip-audit in an environment of its own; needs a network
	test -x $(VENV)-audit/bin/pip-audit || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: install
	$(BIN)/mypy headprune

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.strength: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[strength]"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-audit .headprune .cache/mutations .coverage build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
