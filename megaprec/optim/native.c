/* Two passes of the optimizer step over memory, for megaprec/optim/native.py.

Each element is read once and written once. Work is cut into spans of a fixed length, so results do not depend on the
number of threads. The loops are plain C that compilers turn into vector instructions; what is written and not read
again soon (the rounded weights) goes past the caches where the machine can do that. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { SPAN = 1 << 16, BLOCK = 512 }; /* elements; a block is summed in FP32, a span is one thread's unit of work */

static long min_(long a, long b) { return a < b ? a : b; }

long megaprec_span(void) { return SPAN; }

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64)));
enum { LANES = 16, AT_ONCE = 4, AHEAD = 2048, NEAR = 512, PAIR = 2 * LANES };

/* Sum of squares and number of zeros of `n` <= BLOCK elements. An FP32 sum that overflowed, or that may have lost
squares that underflowed, is recomputed in FP64: it is finite exactly if all elements are. */
static double block(const float *x, long n, int64_t *zeros) {
    Floats sums[AT_ONCE] = {0};
    Ints counts[AT_ONCE] = {0};
    long i = 0, none = 0;
    float sum = 0;
    for (; i + LANES * AT_ONCE <= n; i += LANES * AT_ONCE)
        for (int k = 0; k < AT_ONCE; k++) {
            Floats some = *(const Floats *)(x + i + LANES * k);
            sums[k] += some * some;
            counts[k] -= (Ints)(some == 0);
        }
    Floats all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    Ints count = counts[0] + counts[1] + counts[2] + counts[3];
    for (int k = 0; k < LANES; k++) sum += all[k], none += count[k];
    for (; i < n; i++) sum += x[i] * x[i], none += x[i] == 0;
    *zeros += none;
    if ((sum > 1e-25f && sum <= FLT_MAX) || none == n) return sum;
    double wide = 0;
    for (i = 0; i < n; i++) wide += (double)x[i] * x[i];
    return wide;
}

/* For each span of x[n]: sums[] of squares, zeros[] counted (-0.0 is one). */
void megaprec_statistics(const float *x, long n, double *sums, int64_t *zeros, int threads) {
    long spans = (n + SPAN - 1) / SPAN;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long s = 0; s < spans; s++) {
        long end = min_((s + 1) * SPAN, n);
        double sum = 0;
        zeros[s] = 0;
        for (long i = s * SPAN; i < end; i += BLOCK) {
            for (long k = i; k < i + BLOCK; k += LANES) __builtin_prefetch(x + k + AHEAD, 0, 0); /* to be read once */
            sum += block(x + i, min_(BLOCK, end - i), zeros + s);
        }
        sums[s] = sum;
    }
}

typedef struct {
    float divisor, decay, beta1_rest, beta2, beta2_rest, root, eps, step_size; /* see native.py */
} Numbers;

/* bytes from `from` to `to`, past the caches if `to` is aligned for that */
static void store(void *to, const void *from, long bytes) {
    long done = 0;
#ifdef __SSE2__
    if (((uintptr_t)to & 15) == 0)
        for (; done + 16 <= bytes; done += 16)
            _mm_stream_si128((__m128i *)((char *)to + done), _mm_loadu_si128((const __m128i *)((const char *)from + done)));
#endif
    memcpy((char *)to + done, (const char *)from + done, bytes - done);
}

static uint16_t bf16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value != value ? 0x7fc0 : rounded;
}

/* AdamW with torch's order of operations, so that the results are torch's to the last bit. */
static inline void update(float *restrict w, const float *restrict g, float *restrict m, float *restrict v,
                          uint16_t *restrict rounded, long n, Numbers k) {
    int far = k.beta1_rest >= 0.5f; /* average nearer to the gradient than to its old value: start from there */
    float share = far ? k.beta1_rest - 1 : k.beta1_rest;
    for (long i = 0; i < n; i++) {
        float grad = g[i] / k.divisor;
        float average = fmaf(share, grad - m[i], far ? grad : m[i]);
        float square = fmaf(k.beta2_rest * grad, grad, v[i] * k.beta2);
        float weight = w[i] * k.decay + -k.step_size * average / (sqrtf(square) / k.root + k.eps);
        w[i] = weight, m[i] = average, v[i] = square;
        rounded[i] = bf16(weight);
    }
}

/* `n` <= BLOCK elements of it. `low`, unless null, gets the new weights in bf16. What comes NEAR elements later is asked
for on the way, a few lines of each stream at a time: a block of all four at once would hold up what is needed now. */
static void update_block(float *w, const float *g, float *m, float *v, uint16_t *low, long n, Numbers k) {
    uint16_t rounded[BLOCK];
    long i = 0;
    for (; i + PAIR <= n; i += PAIR) {
        for (long next = i + NEAR; next < i + NEAR + PAIR; next += LANES) {
            __builtin_prefetch(w + next), __builtin_prefetch(g + next);
            __builtin_prefetch(m + next), __builtin_prefetch(v + next);
        }
        update(w + i, g + i, m + i, v + i, rounded + i, PAIR, k);
    }
    update(w + i, g + i, m + i, v + i, rounded + i, n - i, k);
    if (low) store(low, rounded, n * 2);
}

void megaprec_adamw(float *w, const float *g, float *m, float *v, uint16_t *low, long n, Numbers k, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < n; i += BLOCK)
            update_block(w + i, g + i, m + i, v + i, low ? low + i : 0, min_(BLOCK, n - i), k);
#ifdef __SSE2__
        _mm_sfence(); /* each thread waits for its own stores */
#endif
    }
}
