# Everything a person does with the tree starts here: `make help`.
PYTHON ?= python3
# cpu, cuda (all GPUs), or cuda:0,cuda:1; what is installed and what serves
DEVICE ?= $(if $(filter test-gpu,$(MAKECMDGOALS)),cuda,cpu)
KIND := $(firstword $(subst :, ,$(DEVICE)))
VENV ?= $(if $(filter cuda,$(KIND)),.venv-cuda,.venv)
# A machine with a build of its own names it, e.g. TORCH=/wheels/torch-2.14.1-....whl
TORCH ?=
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/*.proto)
GENERATED := $(PROTOS:.proto=_pb2.py)
# Three processes for two cores, since a third of a file's time is waiting; each has a file at a time, the long files
# (engines, whole systems) not last.
# A process that dies ends the run: with the one that xdist starts in its place the run would never end.
# Compiled modules are kept even where the environment says otherwise: the tests start a thousand processes that import
# the tree.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help env protos serve test test-fast test-benchmarks test-gpu check bench fuzz figures dist clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

ifeq ($(filter cpu cuda,$(KIND)),)
$(error DEVICE is cpu, cuda, or GPUs by name, cuda:0,cuda:1; not $(DEVICE))
endif

env: $(VENV)/.complete ## the Python environment, pinned (DEVICE=cuda: with a GPU)

$(VENV)/.complete: requirements/base.txt requirements/engine-$(KIND).txt requirements/engine-$(KIND)-nodeps.txt requirements/dev.txt requirements/models.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" DEVICE="$(KIND)" TORCH="$(TORCH)" sh deploy/local/install.sh
	@touch $@

protos: $(GENERATED) ## generated protobuf code

$(GENERATED) &: $(PROTOS) | env
	@echo "generating protobuf code"
	@$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

serve: env protos ## the whole system, until Ctrl-C (DEVICE=cuda, MODELS="folders" or MODELS=smollm2, CATALOGUE=file, CONFIG=prism.toml, ARGS=--help)
	@$(BIN)/python -m deploy serve $(if $(CONFIG),--config $(CONFIG),--device $(DEVICE)) $(if $(CATALOGUE),--catalogue $(CATALOGUE)) $(if $(MODELS),--models $(MODELS)) $(ARGS)

test: env protos ## all tests that need no GPU
	@$(PYTEST)

test-fast: env protos ## the tests that start no SGLang
	@$(PYTEST) -m "not sglang and not gpu"

test-benchmarks: env protos ## the tests of benchmarks/
	@$(PYTEST) benchmarks/tests

test-gpu: env protos ## the tests that need a GPU
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

check: env protos ## format, lint, types
	@$(BIN)/ruff check .
	@$(BIN)/mypy services balloond loader gpu_scheduler placement gateway kv_kinds tokenization prismctl deploy sim
# What runs for half an hour on GPUs, and then not at all because of a name.
	@$(BIN)/mypy -m benchmarks.gpu.compare -m benchmarks.gpu.compared -m benchmarks.gpu.stack -m benchmarks.sim_check \
		-m benchmarks.gpu.http_beside_sglang -m benchmarks.gpu.bench_client -m benchmarks.gpu.first_start \
		-m benchmarks.gpu.adapters -m benchmarks.gpu.state_kernels

bench: env protos ## the benchmarks that need no GPU; results in benchmarks/results
	@$(BIN)/python -m benchmarks.policy
	@$(BIN)/python -m benchmarks.page_path
	@$(BIN)/python -m benchmarks.request_path

fuzz: env protos ## nonsense to every way in; half an hour of it
	@$(BIN)/python -m benchmarks.fuzz

figures: env ## docs/lab/figures, drawn from benchmarks/results
	@$(BIN)/python -m benchmarks.figures

dist: env ## wheel and sdist, in dist/
	@rm -rf build dist
	@$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')" >/dev/null
	@rm -rf build
	@ls dist/*

clean: ## generated code and run files; not the environment
	rm -rf $(GENERATED) protos/*_pb2.pyi protos/*_pb2_grpc.py .run build dist
