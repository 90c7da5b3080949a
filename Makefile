# Each target runs on a fresh machine with Python >= 3.11, make, a C compiler and git.
# `.ci/setup SET` installs; each target asks for the smallest set that it can run with.
# PYTHON=python3.12 chooses the interpreter of .venv.

export PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE # the tests start many processes, and each would compile what it imports
bin := .venv/bin
demo_set := .venv/.ready-demo
bench_set := .venv/.ready-bench
dev_set := .venv/.ready-dev

.PHONY: demo train-demo bench check test lint docs stress soak fuzz gpu-check wheel clean

demo: $(demo_set)  ## make data, start an S3 server, measure, print the table, draw the chart
	$(bin)/fastload demo $(ARGS)

train-demo: $(demo_set)  ## the reference trainer: 2 ranks learn eight shapes from an S3 bucket
	$(bin)/python examples/resnet50/demo.py $(ARGS)

bench: $(bench_set)  ## fastload and the other loaders: the tables of docs/benchmarks.md; ARGS=--quick: a short form
	$(bin)/python -m bench compare $(ARGS)

check: $(dev_set)  ## the tests that need no server and no other process, for the inner loop
	$(bin)/python -m pytest -n 4 tests/unit -m "not stress" $(ARGS)

test: $(dev_set)  ## all tests except the long forms and the guard-removed tests
	$(bin)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not stress" $(ARGS)

stress: $(dev_set)  ## the long forms, and the tests that remove a guard and show the harm
	$(bin)/python -m pytest -m stress $(ARGS)
	$(bin)/python -m tests.oracle --jobs 200000 --seed 1

soak: $(dev_set)  ## an hour of random epochs under faults and kills; ARGS="--minutes 10 --folder soak": in parts
	$(bin)/python -m tests.soak $(ARGS)

lint: $(dev_set)  ## style and types
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

docs: $(dev_set)  ## the documentation, docs/_build/html; every warning is an error
	$(bin)/sphinx-build -W --keep-going -q -b html docs docs/_build/html $(ARGS)

.PHONY: docs-look
docs-look:  ## the built documentation in Chromium: overflow, missing images, docs/_build/look; needs playwright
	$(bin)/python docs/look.py $(ARGS)

fuzz: $(dev_set)  ## hostile bytes into the native kernel, and into every reader
	$(bin)/python -m tests.fuzz.kernel --seconds 60
	$(bin)/python -m tests.hostile --seconds 60

# Uses the installed torch for this GPU and the sources of this checkout: PYTHON=python3.12
gpu-check:  ## the tests and figures that need a GPU, bench/results/<gpu>-<date>.json
	$(PYTHON) -m bench gpu_check $(ARGS)

wheel:  ## dist/: the sdist and the wheel, which is tried without compiler and headers
	.ci/wheel

clean:  ## remove only the files that the targets above made
	rm -rf .venv build dist fastload-demo train-demo docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find fastload -name '*.so' -delete

# Stamps: a set is installed once, and again when its contents change. A larger set also stamps the smaller
# ones that it contains, so `make demo` after `make test` installs nothing.
.venv/.ready-%: .ci/setup constraints.txt pyproject.toml $(wildcard setup.py)
	.ci/setup $*
