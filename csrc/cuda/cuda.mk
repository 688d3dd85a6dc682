# Builds libdsc_cuda.so, a library of its own over the static CUDA runtime, wherever there is an nvcc; and the libraries that the tests of accel and cuda load.
# Included by csrc/Makefile.
#
#   make cuda [NVCC=nvcc] [CUDA_ARCHS="80 90"]     fails when there is no nvcc; `make has-cuda` asks, and prints nothing

NVCC ?= $(or $(shell command -v nvcc 2> /dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
NVCC_MAJOR = $(shell $(NVCC) --version 2> /dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p')

# Machine code for these architectures, and PTX of 9.0, or of the last without it, for later ones.
CUDA_ARCHS ?= 80 90$(if $(filter-out 9 10 11 12,$(NVCC_MAJOR)), 100)
CUDA_PTX = $(or $(filter 90,$(CUDA_ARCHS)),$(lastword $(CUDA_ARCHS)))
CUDA_GENCODE = $(foreach arch,$(CUDA_ARCHS),-gencode=arch=compute_$(arch),code=sm_$(arch)) -gencode=arch=compute_$(CUDA_PTX),code=compute_$(CUDA_PTX)

# -fmad=false: the host's loops do not contract either (Note: Same bits as the host). No -Werror: the host compiler sees nvcc's generated code, too.
CUDA_FLAGS := -std=c++17 -O3 -fmad=false --threads 0 -I. -Iinclude \
	-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra

# By its version, because a script that starts the real nvcc stays the same when the toolkit changes.
CUDA_CACHED = $(if $(CACHED),env 'CCACHE_COMPILERCHECK=%compiler% --version' $(CACHED))

CUDA_SRCS := $(sort $(wildcard cuda/*.cu))
CUDA_HEADERS := cpu/gelu.inc base/half.h quant/format.h $(wildcard cuda/*.h cuda/*.cuh include/dsc/*.h include/dsc/*.inc)
CUDA_LIB := $(BUILD)/libdsc_cuda.so

cuda: $(CUDA_LIB)

has-cuda:
	@test -n "$(NVCC)"

# All sources as one: a third of the time of one by one, as each would parse the toolkit's headers for each architecture.
$(BUILD)/cuda/all.cu: cuda/cuda.mk $(CUDA_SRCS)
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(CUDA_SRCS) > $@

$(CUDA_LIB): $(BUILD)/cuda/all.cu $(CUDA_HEADERS) cuda/exports.map
	@test -n "$(NVCC)" || { echo "no nvcc on PATH or in CUDA_HOME: the CUDA library cannot be built" >&2; exit 1; }
	@echo "NVCC $(@:$(BUILD)/%=%)"
	@$(CUDA_CACHED) $(NVCC) $(CUDA_FLAGS) $(CUDA_GENCODE) -c $< -o $(BUILD)/cuda/all.o
	@$(NVCC) -shared -cudart static -Xlinker=--version-script=cuda/exports.map,-z,defs,-s $(BUILD)/cuda/all.o -o $@

.PHONY: cuda has-cuda

# For the tests: libraries that are wrong in one way each, and the CUDA sources over an emulated device. They bear the real library's name and lie in
# folders of their own beside the test program.

ACCEL_TESTS := $(BUILD)/tests/csrc/accel
FAKES := no_entry no_table old_abi other_size no_hook no_device broken_device good
FAKE_LIBS := $(FAKES:%=$(ACCEL_TESTS)/%/libdsc_cuda.so)

$(FAKE_LIBS): $(ACCEL_TESTS)/%/libdsc_cuda.so: $(TESTS)/csrc/accel/fake/fake.c include/dsc/accel.h
	@mkdir -p $(@D)
	@$(CC) $(DSC_CFLAGS) $(CFLAGS) -shared -DFAKE_$* $< -o $@

$(ACCEL_TESTS)/test_accel: | $(FAKE_LIBS)

# The emulator's threads are coroutines, which the thread sanitizer does not follow; and it has to be a compiler for the same machine.
CUDA_EMULATED := $(BUILD)/tests/csrc/cuda/emulated/libdsc_cuda.so
CAN_EMULATE = $(if $(findstring thread,$(SAN)),,$(filter $(shell $(CC) -dumpmachine),$(shell $(CXX) -dumpmachine 2> /dev/null)))

CUDA_EMULATED_SAN := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer,-fsanitize=alignment -fsanitize-undefined-trap-on-error)

$(CUDA_EMULATED): $(BUILD)/cuda/all.cu $(CUDA_HEADERS) $(wildcard $(TESTS)/csrc/cuda/emulator/*.h)
	@mkdir -p $(@D)
	@echo "CXX $(@:$(BUILD)/%=%)"
	@$(CACHED) $(CXX) -x c++ -std=c++17 -O1 -g1 -fPIC -fno-strict-aliasing -ffp-contract=off -fvisibility=hidden -Wall -Wextra -Werror \
		-DDSC_CUDA_MAX_BLOCKS=5 -DDSC_CUDA_MAX_PARTIALS=3 $(CUDA_EMULATED_SAN) \
		-I$(TESTS)/csrc/cuda/emulator -I. -Iinclude -c $< -o $@.o
	@$(CXX) -shared $(CUDA_EMULATED_SAN) $@.o -o $@

$(BUILD)/tests/csrc/cuda/test_twins $(BUILD)/tests/csrc/cuda/test_nn_twins $(BUILD)/tests/csrc/cuda/test_moe_twins $(BUILD)/tests/csrc/cuda/test_quant_twins: | $(if $(CAN_EMULATE),$(CUDA_EMULATED))
