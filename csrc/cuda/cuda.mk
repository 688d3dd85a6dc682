# Builds libdsc_cuda.so, a library of its own over the static CUDA runtime, wherever there is an nvcc. Included by csrc/Makefile.
#
#   make cuda [NVCC=nvcc] [CUDA_ARCHS="80 90"]     an error when there is no nvcc: who calls it asks `make has-cuda` first

NVCC ?= $(or $(shell command -v nvcc 2> /dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
NVCC_MAJOR = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')

# Machine code for these, and PTX of the last for what comes after.
CUDA_ARCHS ?= 80 90
CUDA_GENCODE = $(foreach arch,$(CUDA_ARCHS),-gencode=arch=compute_$(arch),code=sm_$(arch)) \
	-gencode=arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))

# -fmad=false: the host's loops do not contract either (Note: Same bits as the host).
CUDA_FLAGS := -std=c++17 -O3 -fmad=false -I$(ROOT) -I$(ROOT)/include \
	-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra,-Werror

CUDA_SRCS := $(sort $(wildcard $(ROOT)/cuda/*.cu))
CUDA_OBJS := $(CUDA_SRCS:$(ROOT)/%.cu=$(BUILD)/%.o)
CUDA_LIB := $(BUILD)/libdsc_cuda.so

cuda: $(CUDA_LIB)

has-cuda:
	@test -n "$(NVCC)"

$(BUILD)/cuda/%.o: $(ROOT)/cuda/%.cu $(ROOT)/cuda/cuda.mk
	@test -n "$(NVCC)" || { echo "no nvcc on PATH or in CUDA_HOME: the CUDA library cannot be built" >&2; exit 1; }
	@mkdir -p $(@D)
	@echo "NVCC $(@:$(BUILD)/%=%)"
	@$(NVCC) $(CUDA_FLAGS) $(CUDA_GENCODE) -MMD -MP -c $< -o $@

$(CUDA_LIB): $(CUDA_OBJS) $(ROOT)/cuda/exports.map
	@echo "NVCC $(@:$(BUILD)/%=%)"
	@$(NVCC) -shared -cudart static -Xlinker=--version-script=$(ROOT)/cuda/exports.map,-z,defs,--as-needed $(CUDA_OBJS) -o $@

-include $(CUDA_OBJS:.o=.d)

.PHONY: cuda has-cuda
