// Matrix products of four warps at once (wgmma, sm_90a): c[64][n] += a[64][16] b[16][n], with b, and a where it is the
// query, in panels of shared memory. They run beside their warps: between open() and the end of
// await() no register of c or a may be touched. A warp has rows 16 w.. of the 64, as FragC lays them out.
#pragma once

namespace attn {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasGroupProducts = true;
#else
constexpr bool kHasGroupProducts = false;
#endif
#define ATTN_C(c) \
  "+f"((c).x[0]), "+f"((c).x[1]), "+f"((c).x[4]), "+f"((c).x[5]), "+f"((c).x[2]), "+f"((c).x[3]), "+f"((c).x[6]), \
      "+f"((c).x[7])
#define ATTN_C64(c) ATTN_C((c)[0]), ATTN_C((c)[1]), ATTN_C((c)[2]), ATTN_C((c)[3])
#define ATTN_C128(c) ATTN_C64(c), ATTN_C64((c) + 4)
#define ATTN_32 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define ATTN_64 \
  ATTN_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define ATTN_PRODUCT(n, type) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " "

#define ATTN_SCORES(type) \
  asm volatile("{.reg .pred p; setp.ne.u32 p,%34,0; " ATTN_PRODUCT(64, type) ATTN_32 "},%32,%33,p,1,1,0,0;}" \
               : ATTN_C64(c)                                                                                 \
               : "l"(a), "l"(b), "r"(int(adds)))
#define ATTN_OUT(n, list, type, operands, ...)                    \
  asm volatile("{.reg .pred p; setp.eq.u32 p,0,0; " ATTN_PRODUCT(n, type) list "}," operands ",1,1,1;}" \
               : __VA_ARGS__                                      \
               : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b))

template <class E, int D>
struct GroupProducts {
  static constexpr int kRows = 64, kStep = D / 64 * 1024;  // bytes of eight rows of a panel

  // Where rows of a panel lie, as the matrix unit takes it: blocks of 8 rows x 128 bytes, shuffled as RowPanel does;
  // those next to each other in a row are 1024 bytes apart, those below each other kStep.
  ATTN_MEMBER static uint64_t place(Shared at) {
    constexpr uint64_t shuffled = 1, across = 1024 / 16, below = kStep / 16;
    const uint64_t start = uint32_t(__cvta_generic_to_shared(at)) / 16;
    return start | across << 16 | below << 32 | shuffled << 62;
  }
  // The place of dims k * 16.. of the rows at a place, and that of rows k * 16.. .
  ATTN_MEMBER static uint64_t dims(uint64_t place, int k) { return place + (k / 4 * 1024 + k % 4 * 32) / 16; }
  ATTN_MEMBER static uint64_t rows(uint64_t place, int k) { return place + k * 2 * kStep / 16; }

  // c[64][64] = a[64][16] b[64][16]^T, or added to c; rows of both in shared memory.
  ATTN_MEMBER static void multiply(FragC (&c)[4], uint64_t a, uint64_t b, bool adds) {
    if constexpr (E::kDType == kBFloat16) ATTN_SCORES(bf16);
    else ATTN_SCORES(f16);
  }
  // c[64][D] += a[64][16] b[16][D], a in registers.
  ATTN_MEMBER static void multiply(FragC (&c)[D / 16], const FragA& a, uint64_t b) {
    if constexpr (D == 64 && E::kDType == kBFloat16)
      ATTN_OUT(64, ATTN_32, bf16, "{%32,%33,%34,%35},%36,p", ATTN_C64(c));
    else if constexpr (D == 64)
      ATTN_OUT(64, ATTN_32, f16, "{%32,%33,%34,%35},%36,p", ATTN_C64(c));
    else if constexpr (E::kDType == kBFloat16)
      ATTN_OUT(128, ATTN_64, bf16, "{%64,%65,%66,%67},%68,p", ATTN_C128(c));
    else
      ATTN_OUT(128, ATTN_64, f16, "{%64,%65,%66,%67},%68,p", ATTN_C128(c));
  }

  // Before the first product after registers of c or a were written.
  ATTN_MEMBER static void open() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  ATTN_MEMBER static void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  // Waits until at most N closed groups of products are under way.
  template <int N>
  ATTN_MEMBER static void await() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory"); }
  // Keeps the compiler from moving a read or a write of c to the other side.
  template <int N>
  ATTN_MEMBER static void pin(FragC (&c)[N]) {
    ATTN_UNROLL
    for (int i = 0; i < N; i++) {
      ATTN_UNROLL
      for (int e = 0; e < 8; e++) asm volatile("" : "+f"(c[i].x[e]));
    }
  }
  // A barrier of group `group` of the block alone; barrier() is number 0.
  ATTN_MEMBER static void join(int group) { asm volatile("bar.sync %0,128;" : : "r"(group + 1) : "memory"); }
  // What this thread wrote into shared memory can be seen by products from the next barrier on.
  ATTN_MEMBER static void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
};

#undef ATTN_C
#undef ATTN_C64
#undef ATTN_C128
#undef ATTN_32
#undef ATTN_64
#undef ATTN_PRODUCT
#undef ATTN_SCORES
#undef ATTN_OUT

}  // namespace attn
