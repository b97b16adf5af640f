# Two commands for a newcomer: `make demo` (the main job on local files) and `make test` (the whole suite).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTO_VENV ?= .venv-protos
PROTO_STAMP := $(PROTO_VENV)/.installed
PROTO_SRC := $(wildcard protos/ckptd/protos/*.proto)

.PHONY: help install demo test test-all unit chaos soak check lint types format protos protos-check clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 on PATH; install one or set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"error: $(PYTHON) is Python {v[0]}.{v[1]}; ckptd needs 3.11 or newer (set PYTHON=/path/to/python3.11)" if v < (3, 11) else (print(f"note: using Python {v[0]}.{v[1]}; constraints.txt is tested with 3.11") if v[:2] != (3, 11) else 0))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## install into .venv what everything else needs

demo: $(STAMP) ## the main job: eight ranks on two nodes are killed twice and come back bit for bit
	$(BIN)/python examples/demo.py

# Most tests wait for processes: two workers keep two cores busy. A file stays with one worker, because its tests share fixtures.
# Files begin in the order of tests/fixtures/order.py, the longest first.
TEST_WORKERS ?= 2
test: $(STAMP) ## the whole suite
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(STAMP) ## the whole suite and the long tests that it leaves out: an hour
	CKPTD_TEST_LONG=1 CKPTD_TEST_SCENARIOS=all CKPTD_TEST_GRID=all $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

unit: $(STAMP) ## the fast half
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder tests/unit

# 40 minutes to an hour on two cores, the real job at the end among them; what is broken off goes on where it stopped.
# ARGS='--store local --only "coordinator.*"' for a part.
chaos: $(STAMP) ## a fault at every boundary of the protocol, in every role, on both stores
	$(BIN)/ckptd chaos matrix $(ARGS)
	$(if $(ARGS),,$(BIN)/ckptd chaos matrix --moe examples/train_moe.py --store local)

# Until ten minutes are up; ARGS='--minutes 480 --store s3' for a night.
soak: $(STAMP) ## random schedules of several faults in one run, on both stores
	$(BIN)/ckptd chaos soak $(or $(ARGS),--minutes 10 --store both)

# In parts, so that `make -j2 check` does two at once.
check: protos-check lint types ## ruff, mypy --strict, import-linter, protos up to date

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Generated with old, pinned tools, so that the checked-in code imports under protobuf 5.29 to 7.x.
$(PROTO_STAMP):
	test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.71.2 protobuf==5.29.6 mypy-protobuf==3.6.0 'setuptools<81'
	@touch $@

PROTOC = $(CURDIR)/$(PROTO_VENV)/bin/python -m grpc_tools.protoc
protos: $(PROTO_STAMP) ## regenerate the code under protos/
	PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTOC) -I protos --python_out=protos --mypy_out=quiet:protos \
	    --grpc_python_out=protos --mypy_grpc_out=quiet:protos $(PROTO_SRC)

protos-check: $(PROTO_STAMP) ## fail when the checked-in generated code is stale
	@rm -rf build/protos && mkdir -p build/protos
	@PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTOC) -I protos --python_out=build/protos --mypy_out=quiet:build/protos \
	    --grpc_python_out=build/protos --mypy_grpc_out=quiet:build/protos $(PROTO_SRC)
	@for f in $$(cd build/protos && find . -type f); do cmp -s "build/protos/$$f" "protos/$$f" \
	    || { echo "error: protos/$$f is stale; run 'make protos' and commit the result" >&2; exit 1; }; done
	@rm -rf build/protos

clean: ## remove what was built; keeps .venv
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
