# Everything a person does with the tree starts here: `make help`.
PYTHON ?= python3
VENV ?= .venv
# A machine with a GPU names its own build, e.g. TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/*.proto)
GENERATED := $(PROTOS:.proto=_pb2.py)

.DEFAULT_GOAL := help
.PHONY: help env protos serve test test-fast test-gpu check bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

env: $(VENV)/.complete ## the Python environment, pinned, without a GPU

$(VENV)/.complete: requirements/base.txt requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt requirements/dev.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" sh deploy/local/install.sh
	@touch $@

protos: $(GENERATED) ## generated protobuf code

$(GENERATED) &: $(PROTOS) | env
	@echo "generating protobuf code"
	@$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

serve: env protos ## the whole system with three small models, until Ctrl-C (CATALOGUE=file, ARGS=--help)
	@$(BIN)/python -m deploy.local $(if $(CATALOGUE),--catalogue $(CATALOGUE)) $(ARGS)

test: env protos ## all tests that need no GPU
	@$(BIN)/python -m pytest -q

test-fast: env protos ## the tests that start no SGLang
	@$(BIN)/python -m pytest -q -m "not sglang and not gpu"

test-gpu: ## the tests that need a GPU (on the machine that has it)
	python3 -m pytest -q -m gpu tests/gpu

check: env protos ## format, lint, types
	@$(BIN)/ruff check .
	@$(BIN)/mypy services balloond loader gpu_scheduler placement gateway prismctl deploy

bench: env protos ## the benchmarks that need no GPU; results in benchmarks/results
	@$(BIN)/python -m benchmarks.policy
	@$(BIN)/python -m benchmarks.page_path
	@$(BIN)/python -m benchmarks.request_path

clean: ## generated code and run files; not the environment
	rm -rf $(GENERATED) protos/*_pb2.pyi protos/*_pb2_grpc.py .run
