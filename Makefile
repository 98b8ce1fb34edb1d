# The commands a person types. The work is in tools/*.py; CMake presets (CMakePresets.json) serve who
# wants to build by hand. Everything installed goes into .venv, everything built into build/.
PYTHON ?= python3
ARGS ?=

.PHONY: help demo check test wheels lint format docs soak fuzz bench clean distclean

help:
	@echo "make demo     set up .venv, build, run 'unjam demo' (ARGS=\"--seed 3\" passes options on)"
	@echo "make check    the quick part of make test, without torch and CUDA: about six minutes at first"
	@echo "make test     everything CI runs: lint, unit tests, sanitizers, CUDA build, Python tests"
	@echo "make wheels   wheels with torch's adapters inside, in dist/ (ARGS=\"--torch 2.11 --no-cuda\")"
	@echo "make lint     the checks that read the code only; make format mends its layout"
	@echo "make docs     the site, in build/site"
	@echo "make soak     the long tests"
	@echo "make fuzz     coverage-guided fuzzing of the control layer; needs clang++"
	@echo "make bench    the benchmarks in bench/"
	@echo "make clean    removes build/; make distclean removes .venv as well"

demo:
	@$(PYTHON) tools/demo.py $(ARGS)

check:
	@$(PYTHON) tools/ci.py check

test:
	@$(PYTHON) tools/ci.py test

wheels:
	@$(PYTHON) tools/wheels.py $(ARGS)

lint:
	@$(PYTHON) tools/lint.py

format:
	@$(PYTHON) tools/lint.py --fix

docs:
	@$(PYTHON) tools/docs.py $(ARGS)

soak:
	@$(PYTHON) tools/ci.py soak

fuzz:
	@$(PYTHON) tools/fuzz.py $(ARGS)

bench:
	@$(PYTHON) tools/bench.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache

distclean: clean
	rm -rf .venv
