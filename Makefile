# The commands of this project. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
STAGE ?=
BUDGET ?=
STEPS ?=
TP ?=
PP ?=
EXPERTS ?=
EP ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
HF_FLAGS ?=
COMPRESS_FLAGS ?=
QLORA_FLAGS ?=
SERVE_FLAGS ?=
TRAIN_FLAGS := $(if $(STAGE),--stage $(STAGE)) $(if $(STEPS),--steps $(STEPS)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(TP),--tp $(TP)) $(if $(PP),--pp $(PP)) \
	$(if $(EXPERTS),--experts $(EXPERTS)) $(if $(EP),--ep-size $(EP))

# A stamp file records that one step of the set-up is done. The step is repeated when the stamp is older than its
# sources. Stamps lie in the environment, so that deleting the environment deletes them.
SYSTEM := $(VENV)/.system
ENV := $(VENV)/.made
BUILT := $(VENV)/.built
HF := $(VENV)/.hf
QLORA := $(VENV)/.qlora
SERVE := $(VENV)/.serve
ALL := $(VENV)/.all

# Python files are installed as links (-e) and need no new build.
SOURCES := setup.py pyproject.toml $(shell find csrc ops/binding -type f \
	\( -name '*.c' -o -name '*.h' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.mk' -o -name '*.map' -o -name Makefile \) \
	-not -path '*/build/*')

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Programs that pip and pytest start are no jobs of this make (-j), and would look for its job server in vain.
unexport MAKEFLAGS

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) NPROC=$(NPROC) STAGE=0|1|2|3 STEPS=n BUDGET=10MiB TP=n PP=n EXPERTS=n EP=n"

.PHONY: train
train: $(BUILT) ## set up what is missing, then train a GPT on the Python standard library with ZeRO
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/train_gpt.py \
		--deepspeed --deepspeed_config examples/ds_config.json $(TRAIN_FLAGS)

# Trains a new model at stage 2, resumes the run, and trains adapters for the model at stage 3: uses of DeepSpeed by
# transformers and peft, on deepspeed_c.
.PHONY: hf
hf: $(HF) ## the same text with transformers.Trainer: train at stage 2, resume, add LoRA at stage 3, generate
	rm -rf out/hf out/hf_lora
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/hf_trainer.py --deepspeed examples/ds_hf_stage2.json $(HF_FLAGS)
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/hf_trainer.py --deepspeed examples/ds_hf_stage3.json --resume $(HF_FLAGS) --max_steps 150
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/hf_trainer.py --deepspeed examples/ds_hf_stage3.json $(HF_FLAGS) \
		--model_path out/hf/model --lora 8 --output_dir out/hf_lora
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/hf_generate.py out/hf/model

.PHONY: rl
rl: $(HF) ## an actor that trains and generates in turn: policy optimization of a small OPT at stage 3
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/ppo_tiny.py --stage $(or $(STAGE),3)

.PHONY: opd
opd: $(HF) ## a small Llama that learns from its teacher on text that it writes itself (on-policy distillation) at stage 3
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/opd_tiny.py --stage $(or $(STAGE),3)

.PHONY: serve
serve: $(SERVE) out/hf/model/tokenizer.json ## the model of `make hf` behind a server with OpenAI's routes, which a client asks
	$(BIN)/python examples/serve_hf.py out/hf/model $(SERVE_FLAGS)

out/hf/model/tokenizer.json: | $(HF)
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/hf_trainer.py --deepspeed examples/ds_hf_stage2.json $(HF_FLAGS)

.PHONY: qlora
qlora: $(QLORA) ## adapters beside a frozen Llama in 4 bits at stage 3: loss, and the bytes that a rank keeps
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/qlora.py $(QLORA_FLAGS)

.PHONY: compress
compress: $(BUILT) ## a GPT at 8 and 4 bits, and at half of its rows and heads with distillation: loss, bytes and time as a table
	$(BIN)/python examples/compress_gpt.py $(COMPRESS_FLAGS)

.PHONY: curriculum
curriculum: $(BUILT) ## a GPT without and with two curricula: held-out loss over tokens as a table and a plot
	$(BIN)/deepspeed_c --num_procs $(NPROC) examples/curriculum_gpt.py $(CURRICULUM_FLAGS)

.PHONY: test
test: $(ALL) programs ## everything that CI runs
	scripts/system_packages.sh --tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	@$(MAKE) -s -C csrc has-cuda || echo "no nvcc: the CUDA kernels are not compiled"
	# Three processes for two cores, because many tests wait for what they have started: two took 1272 s, three 970 s.
	# Without bytecode (PYTHONDONTWRITEBYTECODE) each program that a test starts would compile the package again.
	$(BIN)/python -m compileall -q deepspeed_c ops
	$(BIN)/python -m pytest -n 3 $(TEST_FLAGS)

# The rules of the tree. Tests of a file share what they have parsed, so a file is run by one process.
CHECKS := attributes c_style dead_code documents house imports includes limits makefile prose words

.PHONY: check
check: $(ALL) ## the rules of the tree (names, prose, imports, layout) without what runs the package (30 s)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(CHECKS:%=tests/test_%.py)

.PHONY: test-full
test-full: ## test, with all cells of products of parameters (hours)
	$(MAKE) test TEST_FLAGS=--full

.PHONY: format
format: $(ALL) ## lay out Python as ruff does, and C, C++ and CUDA as .clang-format says
	$(BIN)/ruff format -q .
	git ls-files csrc ops/binding | grep -E '\.(c|h|cu|cuh|cpp)$$' | xargs $(BIN)/clang-format -i

# The C tests build missing programs themselves, and fail if they cannot. This target serves `make -j2 test`: the
# compiler works while pip installs on one core.
.PHONY: programs
programs: cores
	-@for san in "" address,undefined thread; do $(MAKE) -s -j2 -C csrc programs SAN=$$san >/dev/null || exit; done

.PHONY: bench
bench: $(ALL) ## measure everything, alone on the machine (about 2 h), and write docs/performance.md and docs/performance
	$(BIN)/python -m benchmarks.run

# In CI, so that a loss of time in a step's bookkeeping is seen on the day it comes. Times of one run decide nothing: the
# ratio is printed, and no ratio fails.
.PHONY: ratio
ratio: $(BUILT) ## print the time of a step of 200 small layers at stage 3 over DDP's (10 s)
	@OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.deepspeed_c.stage3_step \
		--model small --only ddp replica stage3 --rounds 90 --brief

.PHONY: docs
docs: $(ALL) ## write what is made: docs/config.md, docs/config, docs/compatibility.md, docs/performance*, deepspeed_c/_C.pyi
	$(BIN)/python -m deepspeed_c.config.docs docs
	$(BIN)/python -m scripts.compatibility docs/compatibility.md
	$(BIN)/python -m scripts.missing --write
	$(BIN)/python -m scripts.stubs deepspeed_c/_C.pyi
	$(BIN)/python -m benchmarks.run --docs

.PHONY: site
site: $(BUILT) ## build the API reference from the docstrings: out/site/index.html
	$(PIP) install -c constraints.txt pdoc
	$(BIN)/python -m scripts.reference out/site

.PHONY: build
build: $(BUILT) ## environment and compiled extension only

.PHONY: clean
clean: ## remove what was built, but keep the environment's packages
	rm -rf build dist out logs *.egg-info deepspeed_c/*.so $(BUILT) $(HF) $(QLORA) $(SERVE) $(ALL)
	$(MAKE) -C csrc clean

# The package and the C tests link the same objects, so that these are compiled once, while pip installs.
.PHONY: cores
cores: $(SYSTEM)
	@$(MAKE) -s -j$$(nproc) -C csrc >/dev/null

$(SYSTEM): scripts/system_packages.sh
	scripts/system_packages.sh $(PYTHON)
	@mkdir -p $(@D)
	@touch $@

$(ENV): constraints.txt $(SYSTEM)
	@echo "making the environment $(VENV) with torch (1 min, 1 GB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch setuptools pybind11
	@touch $@

# Object files are kept: tests/test_package.py makes a wheel of them.
INSTALL := DSC_BUILD_DIR=$(CURDIR)/build/objects $(PIP) install --no-build-isolation -c constraints.txt

# What `make train` runs on. Each target brings its own packages: CONTRIBUTING.md has the table.
$(BUILT): $(ENV) $(SOURCES) | cores
	@echo "building deepspeed_c, and installing matplotlib and tqdm (1 min; 5 min on one core without a compiler cache)"
	$(INSTALL) -e ".[examples]"
	@touch $@

$(HF): $(BUILT)
	@echo "installing transformers, accelerate, peft and trl (1 min)"
	$(INSTALL) -e ".[hf]"
	@touch $@

$(QLORA): $(HF)
	@echo "installing bitsandbytes (1 min)"
	$(INSTALL) -e ".[hf,qlora]"
	@touch $@

$(SERVE): $(HF)
	@echo "installing fastapi, uvicorn and prometheus_client (1 min)"
	$(INSTALL) -e ".[hf,serve]"
	@touch $@

# One command, because a second install takes longer. It holds what the stamps above stand for.
$(ALL): $(ENV) $(SOURCES) | cores
	@echo "building deepspeed_c, and installing 118 packages of tests and examples (2.2 GB, 5 min)"
	$(INSTALL) -e ".[examples,hf,monitor,qlora,serve,structured,test,torchao,tuning]" ruff clang-format
	@touch $(BUILT) $(HF) $(QLORA) $(SERVE) $@
