/* What the CPU computes products on. */

#include "native.h"

#ifdef COMPILED

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

END_OF_TARGET /* any CPU can run this */

int actorpp_unit = NOTHING;

/* What the CPU computes products on. For tiles it asks the kernel, once for the process. */
static int best_unit(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18, VECTOR_STATE = 0xe6 };
    const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    const unsigned avx512_bf16 = 1u << 5, amx = 1u << 22 | 1u << 24;  /* BF16, TILE */
    unsigned a, b, c, d, features, saved;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return NOTHING; /* nothing says what the kernel saves */
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if ((saved & VECTOR_STATE) != VECTOR_STATE) return NOTHING;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &features) || (b & avx512) != avx512) return NOTHING;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & avx512_bf16)) return NOTHING;
    if ((features & amx) != amx || syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA)) return VECTORS;
    return TILES;
}

/* From now on compute on the best unit up to that one. Returns which it is. */
int actorpp_start(int most) {
    int best = best_unit();
    actorpp_unit = best < most ? best : most;
    return actorpp_unit;
}

#else

int actorpp_start(int most) {
    (void)most;
    return NOTHING;
}

#endif

/* Callable on any CPU, before all else. */
int actorpp_interface(void) { return INTERFACE; }
