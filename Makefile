# Every target sets up what it needs first.  Only python3 (3.11 or newer), make and git are assumed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BUNDLE ?= artifacts/dirty-mnist-resnet18
PORT   ?= 8000
# CPU=1 asks PyTorch's own index for wheels without CUDA, a fraction of the size.
CPU    ?=
PIP    := $(BIN)/pip install --disable-pip-version-check --constraint requirements.lock \
          $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: help serve test test-all check lint types layers docs rules workflows nightly attack soak audit sbom gpu bench bench-more paper clean

help:                           ## what can be made
	@sed -n "s/^\([a-z-]*\):.*## /\1\t/p" $(MAKEFILE_LIST) | expand -t 12

serve: $(VENV)/.serve           ## set up everything and serve the shipped bundle on http://127.0.0.1:8000
	$(BIN)/psc-serve --bundle $(BUNDLE) --port $(PORT)

test: $(VENV)/.dev              ## set up everything and run the tests, but for those that start processes or whole fits
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not thorough and not slow and not gpu"

test-all: $(VENV)/.dev          ## all tests but the slow ones and those that need a GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu"

check: lint types layers test-all  ## what CI runs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev              ## the documentation site, in site/; where npm is installed, with the demo
	if command -v npm > /dev/null; then npm install --silent --prefix out/npm onnxruntime-web@1 || echo "no demo: npm found no onnxruntime-web"; fi
	$(BIN)/mkdocs build

OPERATOR := deploy/kustomize/components/prometheus-operator

rules: deploy/alerts.yml        ## the alert rules as a resource of the Prometheus operator, for its overlay
	{ printf 'apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: psc\nspec:\n'; sed 's/^/  /' $<; } > $(OPERATOR)/rules.yaml

workflows: $(VENV)/.dev         ## actionlint over the hosted CI; installing it asks GitHub
	$(PIP) --quiet --editable '.[workflows]'
	$(BIN)/actionlint

FUZZED := decode multipart v2 grpc onnx

nightly: $(VENV)/.dev           ## the slow tests too, with random examples; ten minutes of fuzzing each where atheris is installed
	$(BIN)/pytest -m "not gpu" --hypothesis-profile nightly
	for target in $(FUZZED); do $(BIN)/python -m tools.fuzz $$target --seconds 600 || exit 1; done

attack: $(VENV)/.dev            ## what an attack found once, against a service that runs now: a table
	PSC_BACKEND=folded $(BIN)/python -m tools.attack

# Of the versions in requirements.lock.  The tools have an environment of their own: they are no part of the project.
audit: $(VENV)/.audit           ## known vulnerabilities, which PyPI is asked for
	$(VENV)/audit/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip

sbom: $(VENV)/.audit            ## a bill of materials in CycloneDX's format, out/sbom.json
	mkdir -p out
	$(VENV)/audit/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible -o out/sbom.json

MINUTES ?= 30

soak: $(VENV)/.dev              ## mixed requests, clients that leave and reloads for MINUTES: what is lost, what grows
	$(BIN)/python -m tools.soak --minutes $(MINUTES)

PAPER := ddu_case_study collapse_figure projection_table cifar10_uq

paper: $(VENV)/.bench           ## the paper's tables and the OOD comparison, CPU scale; PSC_DATA names the data
	for script in $(PAPER); do $(BIN)/python -m benchmarks.paper.$$script --scale cpu --data $(PSC_DATA) || exit 1; done
	$(BIN)/python -m benchmarks.ood.run --scale cpu --data $(PSC_DATA)
	$(BIN)/python -m benchmarks.report

# In parts of at most eight minutes each, named in benchmarks/README.md; PART= runs all of them.
# RUN=python3 uses an environment that is there already; DEVICE=cpu is a rehearsal without a GPU.
PART   ?= smoke tests
DEVICE ?= cuda
RUN    ?= $(BIN)/python

gpu: $(if $(filter $(BIN)/python,$(RUN)),$(VENV)/.bench)  ## on a CUDA machine: every path once, or PART="device-small paper-sn …"
	$(RUN) -m benchmarks.device.plan $(PART) --device $(DEVICE) $(if $(PSC_DATA),--data $(PSC_DATA))

QUICK_PEERS := --only psc mosec litserve bentoml fastapi --best-instructions --seconds 0.5 --rounds 2 --sweeps 1

bench: $(VENV)/.bench           ## speed of the service beside its peers, and of one network's step; within ten minutes
	began=$$(date +%s) && \
	$(BIN)/python -m benchmarks.serving.peers $(QUICK_PEERS) && \
	$(BIN)/python -m benchmarks.device.run --only "ResNet-18, 28" tail && \
	echo "$$(($$(date +%s) - began)) seconds"

bench-more: $(VENV)/.bench      ## all peers, instruction sets and networks
	$(BIN)/python -m benchmarks.serving.peers
	$(BIN)/python -m benchmarks.device.run

$(VENV)/.serve: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once: $(if $(CPU),PyTorch without CUDA,about 6 GB; without a GPU, make $(MAKECMDGOALS) CPU=1 takes much less)"
	$(PIP) --editable '.[fast,onnx]'
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing what the tests need"
	$(PIP) --quiet --editable '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "Installing what the benchmarks need"
	$(PIP) --quiet --editable '.[dev,bench]'
	touch $@

$(VENV)/.audit: $(VENV)/.serve
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10' 'cyclonedx-bom>=7.5'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
