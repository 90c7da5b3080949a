# Each target does all that it needs on a fresh machine with Python >= 3.10, make, a C compiler and git.
# The set-up itself is .ci/setup; PYTHON=python3.12 chooses the interpreter of .venv.

export PYTHON ?= python3
bin := .venv/bin
ready := .venv/.ready

.PHONY: demo train-demo bench test lint stress fuzz gpu-check clean

demo: $(ready)  ## make data, start an S3 server, measure, print the table, draw the chart
	$(bin)/fastload demo $(ARGS)

train-demo: $(ready)  ## the reference trainer: 2 ranks learn eight shapes from an S3 bucket
	$(bin)/python examples/resnet50/demo.py $(ARGS)

bench: $(ready)  ## us and the peers: the README's tables, in about an hour; ARGS=--quick: within minutes
	$(bin)/python -m bench compare $(ARGS)

test: $(ready)  ## the test suite, without the long forms of random tests
	$(bin)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not stress" $(ARGS)

lint: $(ready)  ## style and types
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

stress: $(ready)  ## the long forms
	$(bin)/python -m pytest -m stress $(ARGS)

fuzz: $(ready)  ## hostile bytes into the native kernel
	$(bin)/python -m tests.fuzz.kernel --seconds 60

# With the Python that torch for this GPU is installed in, and the sources as they are: PYTHON=python3.12
gpu-check:  ## all that needs a GPU: its tests, its figures, bench/results/<gpu>-<date>.json
	$(PYTHON) -m bench.gpu_check $(ARGS)

clean:  ## what the targets above made, and nothing else
	rm -rf .venv build fastload-demo train-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis fastload.egg-info
	find fastload -name '*.so' -delete

# A stamp: set up once, and again when what is to be installed changes.
$(ready): .ci/setup constraints.txt pyproject.toml $(wildcard setup.py)
	.ci/setup
	touch $@
