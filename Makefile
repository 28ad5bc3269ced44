# `make demo` and `make test` need nothing but Python >= 3.11 and make; they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := .cache/models
GGUF := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
STAMP := $(VENV)/.weighbridge-set-up

.PHONY: demo test check model set-up clean

demo: set-up model
	$(BIN)/python scripts/demo.py --model $(GGUF)

# In the order of the folders, which ends with many small files: by default xdist keeps files of few
# tests for the end, and ours with few tests are the longest ones.
test: set-up model
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: set-up
	scripts/check

set-up: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) scripts/require_python.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip<26.2"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	@touch $@

model: $(GGUF)

$(GGUF): scripts/fetch_model.py | set-up
	$(BIN)/python scripts/fetch_model.py --out $(MODELS)

clean:
	rm -rf $(VENV) .cache demo-output dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
