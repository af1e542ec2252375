# Two commands on a fresh machine with Python 3.10 or newer and g++ (nvcc too, where there is a GPU):
#
#   make demo    train a small Mixture-of-Experts language model through the package
#   make test    run the tests
#
# Both make .venv from the pinned requirements. `make demo PYTHON=/path/to/python VENV=` uses that Python and the
# packages it has instead. ARGS are handed on: make test ARGS="-k moe", make demo ARGS="--device cuda --dtype bf16".

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# CI has a CUDA compiler even where the machine has none.
REQUIREMENTS := requirements/dev.txt $(if $(CI),requirements/ci.txt)

ifeq ($(VENV),)
  RUN := $(PYTHON)
  READY :=
else
  RUN := $(VENV)/bin/python
  READY := $(VENV)/installed-$(if $(CI),ci,dev)
endif

# get_kernel loads the variant that is built here. It is named itself, not the checkout: the loader would look there for
# a CUDA variant whenever torch is a CUDA build, even on a machine without a GPU.
WITH_KERNEL = LOCAL_KERNELS="phanerozoic/grouped-gemm-moe=$$($(RUN) tools/build.py --where)" $(RUN)

PIP = $(RUN) -m pip install --quiet --disable-pip-version-check

# For every Python that the package supports; wheels alone, because a build from source fetches more than has a hash.
COMPILE = uv pip compile --quiet --universal --python-version 3.10 --only-binary :all: --generate-hashes \
  --no-annotate --custom-compile-command "make requirements" $(UPGRADE)

# Without a GPU the tests are shared out over the cores, a thread each.
ifeq ($(shell command -v nvidia-smi),)
  PARALLEL := -n auto --maxprocesses 8 --dist loadfile
  test: export OMP_NUM_THREADS := 1
endif

.PHONY: demo test fuzz build lint format record requirements clean

demo: build
	$(WITH_KERNEL) examples/train_moe_lm.py $(ARGS)

test: build
	$(WITH_KERNEL) -m pytest $(PARALLEL) $(ARGS)

# Calls of the public functions, drawn at random: make fuzz ARGS="--minutes 60".
fuzz: build
	$(WITH_KERNEL) tests/fuzz.py $(ARGS)

# The variant for this machine.
build: $(READY)
	@command -v $(RUN) >/dev/null || { echo "There is no $(RUN): name a Python with PYTHON=."; exit 1; }
	$(RUN) tools/build.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Measure everything on this machine's GPU and keep the figures in benchmarks/results.
record: build
	$(WITH_KERNEL) tools/record_gpu.py $(ARGS)

# Everything that the inputs in requirements need, pinned, with hashes. UPGRADE=--upgrade takes the newest of what no
# input pins.
requirements:
	$(COMPILE) -o requirements/dev.txt requirements/dev.in
	$(COMPILE) -o requirements/use.txt requirements/use.in --constraints requirements/dev.txt
	$(COMPILE) -o requirements/ci.txt requirements/ci.in

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis

$(READY): $(wildcard requirements/*.txt)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): name a Python with PYTHON=."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "$(PYTHON) is Python %d.%d, and 3.10 or newer is needed: name one with PYTHON=." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --only-binary :all: $(addprefix -r ,$(REQUIREMENTS))
	$(PIP) -r requirements/torch.txt
	touch $@
