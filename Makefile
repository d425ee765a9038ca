# Every target, with what it does: `make help`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The first interpreter that will do; `make PYTHON=...` names another.
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13 python3.14,$(shell $(name) -c \
	'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && echo $(name))))
UV_VERSION := 0.13.9
UV := .tools/uv/bin/uv
BIN := .venv/bin
LOCKED := .venv/.locked
export UV_PROJECT_ENVIRONMENT := .venv
export HF_HUB_OFFLINE := 1
export GRPC_VERBOSITY := ERROR
# Let Python keep its bytecode: importing torch without it costs seconds in every process.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest
# They wait more than they work, so each worker has a control plane of its own.
CLUSTER_TEST := $(PYTEST) -q -m cluster tests/cluster -n 3 --dist worksteal
# protoc looks for its plugins on PATH.
GENERATE := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/house/generate.py

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/' | expand -t 18

setup: $(LOCKED) ## bootstrap uv into .tools and sync the locked environment into .venv

# uv lives in the project's own tool folder; get it from PyPI with nothing but Python's venv module.
$(UV):
	@test -n "$(PYTHON)" || { echo "sluice needs Python 3.11 to 3.14: none on PATH will do (make PYTHON=/path/to/python3)"; exit 1; }
	@echo "bootstrapping uv $(UV_VERSION) into .tools"
	@$(PYTHON) -m venv .tools/uv
	@.tools/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(LOCKED): uv.lock pyproject.toml | $(UV)
	$(UV) sync --locked --extra dev --group faults --python $(PYTHON)
	@touch $@

up: $(LOCKED) ## start gateway, prefill and decode here, ask the sample question, keep serving (ARGS="--port 9000")
	$(BIN)/sluice up --ask-sample $(ARGS)

check: $(LOCKED) ## format, lint, types, imports, generated files, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p sluice_records -p sluice_protocol -p sluice_kernels -p sluice_runtime -p sluice_engine -p sluice_prefill -p sluice_decode -p sluice_gateway -p sluice_operator -p sluice_faults -p sluice_launch -p sluice_harness -p sluice_cli
	$(BIN)/lint-imports tools/house/layers.ini
	$(GENERATE) --check
	$(PYTEST) -q -m "not process and not slow and not images" -n 3 --dist worksteal

# Faults are judged by the clock: nothing runs beside them but more of their kind.
test: check ## `make check`, then the tests that start processes and the slow ones; without those of a cluster
	$(PYTEST) -q -m "(process or slow) and not cluster and not images" -n 3 --dist worksteal --ignore=tests/chaos
	$(PYTEST) -q -m "process or slow" tests/chaos -n 2 --dist worksteal

cluster-test: cluster-tools ## the operator, CRD and charts against a real API server (7 minutes)
	$(CLUSTER_TEST)

cluster-tools: $(LOCKED) ## build etcd, Kubernetes, kwok and helm for tests/cluster into ~/.cache (needs Go; 9 minutes cold)
	$(BIN)/python tests/support/cluster_tools.py

e2e-scale: cluster-tools ## the operator with 300 ModelDeployments and 3,000 pods; prints times, CPU, requests
	SLUICE_SCALE=300 $(PYTEST) -q -s tests/cluster/test_scale.py

images: $(LOCKED) ## build the images with docker and say how large they are (BASE=sluice-base:bookworm needs no registry, CA_BUNDLE=FILE, TAG=dev)
	$(BIN)/python images/build.py $(if $(BASE),--base $(BASE)) $(if $(CA_BUNDLE),--ca-bundle $(CA_BUNDLE)) --tag $(TAG)

images-test: images ## build them and run each as the operator's pods do, under the restricted profile
	SLUICE_IMAGES_TAG=$(TAG) SLUICE_IMAGES_BASE=$(BASE) SLUICE_IMAGES_CA_BUNDLE=$(CA_BUNDLE) $(PYTEST) -q -m images tests/images

fmt: $(LOCKED) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(LOCKED) ## the whole fault matrix on real processes, floor 5 s; goes on where RESULTS=chaos.jsonl ends
	$(BIN)/sluice chaos matrix --floor 5 --results $(RESULTS) $(ARGS)

proto: $(LOCKED) ## regenerate the protobuf code and the generated docs
	$(GENERATE)

lock: $(UV) ## resolve the dependencies again into uv.lock
	$(UV) lock

clean: ## remove the environment and the caches
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

RESULTS ?= chaos.jsonl
TAG ?= dev

.PHONY: help setup up check test cluster-test cluster-tools e2e-scale images images-test fmt chaos proto lock clean
