# Everything a newcomer needs. Each target does the whole set-up first; when nothing has changed
# since the last time, that takes less than a second.

VENV ?= .venv
PYTHON_IN_VENV := "$(VENV)/bin/python"

# The sources of this working tree win over whatever tree the environment was made from, so that
# several worktrees can share one: make VENV=/path/to/venv test
export PYTHONPATH := $(CURDIR)/src
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-short test next bench rehearse lint format chaos cluster histories alters large baseline writers losses reconnect lake docs types clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: ## Make the virtual environment and find (or install) Java
	@scripts/setup

demo: setup ## Mirror a live shop into three targets, pause, crash, prove that all is equal
	@$(PYTHON_IN_VENV) -m millstream demo

demo-short: setup ## Play the demo in a few seconds, and see that it ends as it says
	@MILLSTREAM_DEMO=1 $(PYTHON_IN_VENV) -m pytest tests/integration/test_demo.py

test: setup ## Run all tests, in four processes at once
	@scripts/servers
	@scripts/test $(PYTHON_IN_VENV)

# The newest pyspark that is supported, in an environment of its own.
NEXT_PYSPARK := 4.3.0
NEXT_VENV ?= .venv-$(NEXT_PYSPARK)

next: ## Run the short form of the tests on the newest PySpark that is supported
	@VENV="$(NEXT_VENV)" PYSPARK=$(NEXT_PYSPARK) scripts/setup
	@"$(NEXT_VENV)/bin/python" -m pytest -m "spark and not chaos" tests

# With RUNS=3 each bench is run three times, every time as a process of its own, for the spread. The results go to
# BENCH_FILE, a line of JSON each. BENCH_OPTIONS may be --force, or --only NAME.
RUNS ?= 1
BENCH_FILE ?= bench.jsonl
BENCH_OPTIONS ?=

bench: setup ## Measure speed and latency on this machine, against others
	@bench/debezium/build || true # it says itself what is missing; the other benches need none of it
	@$(PYTHON_IN_VENV) -m millstream.bench.runs "$(BENCH_FILE)" --runs $(RUNS) $(BENCH_OPTIONS)

rehearse: setup ## Run every bench of mirrors and whole engines once, small, to see that it comes to its figures
	@MILLSTREAM_REHEARSE=1 $(PYTHON_IN_VENV) -m pytest tests/integration/test_bench_mirrors.py

lint: setup ## Check style, format and types
	@$(PYTHON_IN_VENV) -m ruff check
	@$(PYTHON_IN_VENV) -m ruff format --check
	@MYPY_NUM_WORKERS=2 $(PYTHON_IN_VENV) -m mypy

format: setup ## Put the code into its form
	@$(PYTHON_IN_VENV) -m ruff check --fix
	@$(PYTHON_IN_VENV) -m ruff format

chaos: setup ## Kill at each failpoint alone, while capture changes over, then 30 times at random
	@MILLSTREAM_CHAOS_ROUNDS=30 MILLSTREAM_CHAOS_EACH=1 $(PYTHON_IN_VENV) -m pytest -s tests/chaos \
		tests/integration/test_bulk_kills.py tests/integration/test_reload_kills.py tests/integration/test_reload_ranges.py \
		tests/unit/journal/test_journal_recovery.py

cluster: setup ## Run a stream on a standalone cluster, and kill executors and workers under it
	@MILLSTREAM_CLUSTER=1 $(PYTHON_IN_VENV) -m pytest -s tests/integration/test_cluster.py

histories: setup ## Mirror many random histories, filtered ones too, and compare; draw many examples
	@MILLSTREAM_HISTORIES=100 $(PYTHON_IN_VENV) -m pytest tests/integration/test_postgres_target.py \
		tests/integration/test_shape_postgres.py tests/integration/test_shape_spark.py tests/integration/test_shape_rejects.py \
		tests/integration/test_shape_unsent.py \
		$$(grep -rl 'max_examples=examples' tests)

alters: setup ## A hundred random ALTERs mixed with writes, with several seeds, and readers who lag behind all of them
	@MILLSTREAM_ALTERS=100 MILLSTREAM_ALTER_SEEDS=5 $(PYTHON_IN_VENV) -m pytest tests/integration/test_random_alters.py

large: setup ## Capture and deliver one transaction of 5 million rows, and look at the memory of every process
	@MILLSTREAM_LARGE_ROWS=$${MILLSTREAM_LARGE_ROWS:-5000000} $(PYTHON_IN_VENV) -m pytest -s \
		tests/integration/test_large_transaction.py

baseline: setup ## Copy 2 GiB under writes while the engine is killed again and again; once each, and equal
	@MILLSTREAM_BASELINE_GB=$${MILLSTREAM_BASELINE_GB:-2} $(PYTHON_IN_VENV) -m pytest -s tests/integration/test_large_baseline.py

writers: setup ## 24 writers as fast as they can, snapshots in their midst, and a look at the source afterwards
	@MILLSTREAM_WRITERS_SECONDS=$${MILLSTREAM_WRITERS_SECONDS:-120} $(PYTHON_IN_VENV) -m pytest -s tests/integration/test_writers.py

losses: setup ## Whole engines under load whose slot, publication, table or server goes, and transactions left open
	@MILLSTREAM_LOSSES=1 $(PYTHON_IN_VENV) -m pytest tests/integration/test_lost_under_load.py \
		tests/integration/test_promoted.py tests/integration/test_open_writers.py

reconnect: setup ## Come back to a server that keeps 5 GB of log for a paused target
	@MILLSTREAM_WAL_GB=$${MILLSTREAM_WAL_GB:-5} $(PYTHON_IN_VENV) -m pytest -s tests/integration/test_reconnect.py

lake: setup ## Read Delta tables with Spark itself, whose package for that comes from Maven
	@tests/lake/build
	@$(PYTHON_IN_VENV) -m pytest tests/integration/test_delta_spark.py

docs: setup ## Make the pages that are made from the code
	@$(PYTHON_IN_VENV) -m millstream.sources.postgres.typedoc > docs/types/postgres.md

types: setup ## Try every type on every server, and write the matrix of what is proven
	@MILLSTREAM_TYPE_MATRIX=docs/types/matrix.md MILLSTREAM_TYPE_ROWS=300 MILLSTREAM_TYPE_LARGE=1 \
		$(PYTHON_IN_VENV) -m pytest tests/integration/test_types_*.py tests/integration/test_verify_forms.py

clean: ## Remove what set-up, tests and runs have left in this directory
	rm -rf bench.jsonl .venv .venv.lock .venv-* .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
