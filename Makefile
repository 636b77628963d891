# Every target sets up what it needs first.  Only python3 (3.11 or newer), make and git are assumed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BUNDLE ?= artifacts/dirty-mnist-resnet18
PORT   ?= 8000

.PHONY: serve test check lint types layers nightly gpu bench clean

serve: $(VENV)/.serve           ## set up everything and serve the shipped bundle on http://127.0.0.1:8000
	$(BIN)/psc-serve --bundle $(BUNDLE) --port $(PORT)

test: $(VENV)/.dev              ## set up everything and run the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu"

check: lint types layers test   ## what CI runs

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

nightly: $(VENV)/.dev           ## the slow tests too
	$(BIN)/pytest -m "not gpu"

gpu: $(VENV)/.dev               ## the CUDA tests; needs a GPU
	$(BIN)/pytest -m gpu

$(VENV)/.serve: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
