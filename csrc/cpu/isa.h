/* The instruction sets of a build, and the names of per-ISA functions. No other file generates names by macros. */
#ifndef DSC_CPU_ISA_H
#define DSC_CPU_ISA_H

/*
 * Each entry has a name and the test of the processor; the best comes last. The Makefile compiles each per-ISA file
 * once for every name, with -DDSC_ISA=name and the flags of that name. Every processor of the architecture runs
 * "scalar".
 */
#if defined(__x86_64__)
#define DSC_ISA_MAP(X)                                \
    X(scalar, true)                                   \
    X(avx2, __builtin_cpu_supports("x86-64-v3") != 0) \
    X(avx512, __builtin_cpu_supports("x86-64-v4") != 0)
#elif defined(__aarch64__)
#define DSC_ISA_MAP(X) \
    X(scalar, true)    \
    X(neon, true)
#else
#define DSC_ISA_MAP(X) X(scalar, true)
#endif

#define DSC_K_PASTE(name, isa) dsc_##name##__##isa
#define DSC_K_OF(name, isa) DSC_K_PASTE(name, isa)

/* The name of a function, or of a table, in the variant that is being compiled: DSC_K(add_f32) is dsc_add_f32__avx2. */
#ifdef DSC_ISA
#define DSC_K(name) DSC_K_OF(name, DSC_ISA)
#endif

#endif
