# make demo | check | test | test-all | stress | lint | docs | wheel | clean
# Each makes .venv (Python 3.11 or later) and installs what it needs there on first use.
# `make demo ARGS="--data DIR"` hands options on; `make PYTHON=/path/to/python` picks one.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# -P: the root is the package, not a folder to import its parts from one by one.
VENV := .venv/bin/python
RUN := $(VENV) -P -m
# --no-compile: Python compiles what it imports. pip would compile thousands of modules that
# nobody imports, for as long as all the rest takes.
PIP := $(RUN) pip install --disable-pip-version-check --no-compile --progress-bar off \
    --constraint constraints.txt
# pip also warns of what stops nothing: that is shown if something does.
INSTALL = $(PIP) $(1) 2>.venv/errors | .ci/progress || { cat .venv/errors >&2; exit 1; }
PYTHONS := $(or $(PYTHON),$(VENV) python3.11 python3.12 python3.13 python3.14 python3)

# Holds the folder that was installed from: the editable install knows its absolute path.
# .venv/with-NAME says that the extra NAME of pyproject.toml is there, too.
STAMP := .venv/installed-from
# One run of pip brings what tests need, too, if this is what is asked for.
EXTRA := $(if $(filter check lint stress test test-all,$(MAKECMDGOALS)),[test])
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# Tests start hundreds of interpreters: each would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=
# They fork thousands of times, too: memory in large pages makes a fork half as long.
check test test-all stress: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
# Numpy's threads wait by spinning: two cores would do so for a twentieth of the time.
check test test-all stress: export OPENBLAS_NUM_THREADS := 1
# Whoever imports a module first compiles it. Three test workers would do so with each, so
# one process does it for all while mypy keeps only one core busy. Pytest shows any errors.
COMPILE = [ -e .venv/compiled ] || $(RUN) pytest --collect-only -qq >.venv/compiled || true
# Three beside each other keep two cores busy, as tests wait now and then.
BESIDE := -n 3 --dist worksteal
# A slow test may compute for minutes. Python's dump of a thread that runs meanwhile can crash.
PATIENTLY := -o timeout=1200 -o faulthandler_timeout=0
UNITS := tests/autotune tests/cache tests/engine tests/pipeline tests/system

.PHONY: help demo check test test-all stress programs lint docs wheel clean

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

demo: $(STAMP)
	@$(RUN) penstock demo $(ARGS)

check: lint
	@echo "tests: units"
	@$(RUN) pytest $(BESIDE) -m "not (slow or long)" $(UNITS) $(ARGS)

test: lint
	@echo "tests: all but the slow ones"
	@$(RUN) pytest $(BESIDE) $(ARGS)

test-all: programs lint .venv/with-frameworks .venv/with-examples .venv/with-wheel
	@echo "tests: all, side by side; then those that run alone"
	@$(RUN) pytest $(BESIDE) -m "not serial" $(PATIENTLY) $(ARGS)
	@$(RUN) pytest -m serial $(PATIENTLY) $(ARGS)

# Proves that no outcome depends on how busy the machine is. It takes an hour.
stress: lint
	@set -m; for at in 1 2 3 4 5 6 7 8; do \
	    echo "stress: run $$at of 8 beside two busy loops"; \
	    for loop in 1 2; do $(VENV) -c "while True: pass" & done; \
	    trap 'kill $$(jobs -p)' EXIT; \
	    $(RUN) pytest $(BESIDE) -q $(ARGS); \
	    kill $$(jobs -p); wait || true; trap - EXIT; \
	done
	@for at in 1 2 3; do \
	    echo "stress: run $$at of 3 on one core"; \
	    taskset -c 0 $(RUN) pytest $(BESIDE) -q $(ARGS); \
	done

# The tests of the HTML page would fail after three quarters of an hour.
programs:
	@command -v chromium chromium-browser >/dev/null && command -v npm >/dev/null || { \
	    echo "test-all opens pages in Chromium, and gets axe by npm. Install both:" \
	        "apt install chromium npm" >&2; exit 1; }

lint: .venv/with-test .types/penstock
	@echo "lint: ruff check, ruff format, mypy --strict, lint-imports, codespell"
	@$(RUN) ruff check --quiet --output-format concise
	@$(RUN) ruff format --check --quiet || { echo "cure: $(RUN) ruff format"; exit 1; }
	@.venv/bin/lint-imports --no-cache --no-logo >.types/imports || { cat .types/imports; exit 1; }
	@.venv/bin/codespell
	@$(COMPILE) & $(RUN) mypy; wait

# What documents the API reads the folders that it finds, and is shown those of the package.
API := build/api/penstock
CODE := $(wildcard *.py) autotune cache engine integrations mindspore pipeline system

docs: .venv/with-docs
	@rm -rf $(API) && mkdir -p $(API) && ln -s $(addprefix $(CURDIR)/,$(CODE)) $(API)
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet
	@! grep -rloE 'src="https?://[^"]*"' site --include=*.html || \
	    { echo "these pages load something from another host"; exit 1; }
	@echo "docs: site/index.html; with its search: python -m http.server --directory site"

# It carries libjpeg-turbo, so that whoever installs it needs neither a compiler nor headers.
wheel: .venv/with-wheel
	@rm -rf build dist/*.whl
	@$(RUN) build --wheel --outdir build/wheel . >.venv/wheel 2>&1 || { cat .venv/wheel; exit 1; }
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) auditwheel repair --wheel-dir dist \
	    build/wheel/*.whl >.venv/wheel 2>&1 || { cat .venv/wheel; exit 1; }
	@echo "wheel: $$(ls dist/*.whl)"

.types/penstock:
	@mkdir -p .types && ln -sfn .. $@

$(STAMP): pyproject.toml constraints.txt pipeline/image/_photos.c \
    pipeline/image/_reading.h pipeline/image/_resizing.h
	@for python in $(PYTHONS); do \
	    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        >/dev/null 2>&1 && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "penstock needs Python >= 3.11 with venv; tried: $(PYTHONS)." \
	        "Install one, or say make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "set-up: .venv with $$("$$python" --version)"; \
	"$$python" -m venv .venv
	@echo "set-up: penstock and what it needs (half a minute, and the downloads)"
	@$(PIP) -qq setuptools
	@$(call INSTALL,--no-build-isolation --editable .$(EXTRA))
	@$(VENV) -P -c "import torch" & $(VENV) -P .ci/look_for_extension.py # compiles it, too
	@printf '%s' '$(CURDIR)' >$@
	@[ -z "$(EXTRA)" ] || touch .venv/with-test

# penstock is there, so pip takes from it what an extra asks for.
.venv/with-%: $(STAMP)
	@[ -e $@ ] && ! [ $(STAMP) -nt $@ ] || { \
	    echo "set-up: what \`$*\` needs"; \
	    $(call INSTALL,'penstock[$*]'); \
	    touch $@; \
	}

clean:
	@rm -rf .venv .types build dist site *.egg-info \
	    .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@rm -f pipeline/image/_photos.*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: removed .venv, caches and build outputs"
