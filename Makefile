# make demo       compile the example checkpoint, look at its graph, generate text
# make test       the short tests
# make test-full  every test that needs no GPU
# make lint       ruff, pyright, import contracts
# make clean      remove the environment and everything built
#
# Options, remembered by the environment in .venv (a different value makes a new one):
#   PYTHON=python3.12   the interpreter
#   TORCH=2.12.0        another torch release than the one in constraints.txt
#   TORCH=path/to.whl   a torch wheel
#   TORCH=installed     the torch that PYTHON has already
# Options of the tests:
#   JOBS=4              so many at a time, one core and a gigabyte of memory each; 2 by default
#   PYTEST="-k graph"   more options of pytest

VENV := .venv
BIN := $(VENV)/bin
-include $(VENV)/options.mk
PYTHON ?= $(or $(VENV_PYTHON),python3)
TORCH ?= $(VENV_TORCH)
JOBS ?= 2
PYTEST ?=

MODEL := examples/tiny-v4
OUT := build/demo/tiny-v4

SOURCES := $(shell find src ir frontend passes codegen runtime cli csrc -type f -not -name '*.pyc' 2>/dev/null)
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
# The requirements of one optional group, read from pyproject.toml: asking pip for `.[group]` instead
# would build the package once more for each group.
GROUP = $(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'
# The tests of a file stay together: what they share is made once.
RUN_TESTS = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full lint clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# The demonstration reads top to bottom; its last lines are the answer and the continuation.
demo: $(VENV)/package
	@mkdir -p $(dir $(OUT))
	$(BIN)/compile-model $(MODEL) -o $(OUT) --force
	$(BIN)/rewright graph diff '$(MODEL)@traced' '$(MODEL)@layout' --stat
	$(BIN)/rewright generate $(OUT) --chat "What is 17 + 25?" --temperature 0
	$(BIN)/rewright generate $(OUT) -p "In the beginning God created" --temperature 0 --max-new-tokens 48

test: $(VENV)/package $(VENV)/test
	$(RUN_TESTS) -m "not full and not gpu" $(PYTEST)

test-full: $(VENV)/package $(VENV)/test
	$(RUN_TESTS) -m "not gpu" $(PYTEST)

# The contracts are checked on the installed package, the only place where it lies whole.
lint: $(VENV)/package $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

# --- The environment: each file below marks a finished step. ---

ifneq ($(PYTHON)|$(TORCH),$(VENV_PYTHON)|$(VENV_TORCH))
.PHONY: $(VENV)/created
endif

# With TORCH=installed the new environment sees the packages of PYTHON; where PYTHON is itself a virtual
# environment, --system-site-packages would skip it for its base, hence the .pth file. Its torch is
# pinned, so that pip can refuse it but never replace it.
$(VENV)/created:
	@echo "Creating $(VENV) with $(PYTHON)"
ifeq ($(TORCH),installed)
	@$(PYTHON) -c 'import torch' || { echo "TORCH=installed: $(PYTHON) has no torch; give PYTHON=, or leave TORCH out" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv --system-site-packages $(VENV)
	@$(PYTHON) -c 'import sys, sysconfig; print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")' \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed-torch.pth"
else
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
endif
	@printf 'VENV_PYTHON := %s\nVENV_TORCH := %s\n' '$(PYTHON)' '$(TORCH)' > $(VENV)/options.mk
	@touch $@

# constraints.txt with its torch line replaced by the choice made.
$(VENV)/constraints.txt: constraints.txt $(VENV)/created
ifeq ($(TORCH),)
	@cp constraints.txt $@
else
	@grep -v '^torch==' constraints.txt > $@
ifeq ($(TORCH),installed)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $@
else ifneq ($(filter %.whl,$(TORCH)),)
	@echo "torch @ file://$(abspath $(TORCH))" >> $@
else
	@echo "torch==$(TORCH)" >> $@
endif
endif

$(VENV)/package: $(VENV)/constraints.txt pyproject.toml README.md LICENSE $(SOURCES)
	@echo "Installing rewright and what it needs (the first time takes minutes)"
	@$(PIP) install -c $(VENV)/constraints.txt .
	@touch $@

$(VENV)/test $(VENV)/dev: $(VENV)/constraints.txt pyproject.toml | $(VENV)/package
	@echo "Installing the packages of the group '$(@F)'"
	@$(GROUP) $(@F) > $@.part
	@$(PIP) install -c $(VENV)/constraints.txt -r $@.part
	@mv $@.part $@
