/* The accumulator of Hopper's FP8 tensor core on a CPU: the same bits as dsv3fp8/precision/accumulator.py, which defines it.
 *
 * Lanes run over 32 columns of the output. A work item is 32 columns times up to 64 rows: its part of b is decoded once, then
 * K goes by in panels that stay in the first-level cache while all rows pass over them. K is cut into steps of up to 32
 * products (one step of the tensor core); a flag says where a chain ends (its sum enters the fp32 partial) and where a block
 * ends (the partial enters the total with the block's scales).
 *
 * Needs GCC or Clang (vector extensions). Must be compiled without fast-math and with -ffp-contract=off.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 32, WIDTH = 8, VECTORS = LANES / WIDTH, ROWS = 64, PANEL = 4, GROUP = 32, FRACTION = 13, MAX_THREADS = 256 };
enum { CHAIN_ENDS = 1, BLOCK_ENDS = 2 };
enum { UNSCALED, SCALES_TOGETHER, SCALES_ONE_BY_ONE };

typedef float floats __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef int8_t bytes __attribute__((vector_size(LANES), may_alias));
typedef int8_t few_bytes __attribute__((vector_size(WIDTH)));

/* Of one operand's 256 codes: values, and exponents as the tensor core sees them. Zero has one below that of any product. */
typedef struct {
    const float *value;
    const int8_t *exponent;
} table;

typedef struct {
    int64_t m, n, k, steps, blocks;
    const uint8_t *a; /* [m, k], rows contiguous */
    const uint8_t *b; /* [n, k], any strides */
    int64_t b_row, b_col;
    table a_table, b_table;
    const int64_t *start; /* of each step in K */
    const int32_t *count, *flags, *block;
    const float *a_scale, *b_scale; /* [m or n, blocks], any strides */
    int64_t a_scale_row, a_scale_col, b_scale_row, b_scale_col;
    int32_t scaling, special; /* special: a code is NaN or inf */
    float *out;               /* [m, n] */
    int64_t next;             /* work item to be taken */
    int32_t failed;
} job;

typedef struct {
    floats chain[VECTORS], partial[VECTORS], total[VECTORS];
} sums;

static inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

/* One step of the tensor core for one row and 32 columns: `chain` after `count` more products. */
static inline __attribute__((always_inline)) void add_group(floats chain[VECTORS], const uint8_t *a, const floats *b,
                                                            const bytes *b_exponent, int count, const job *j, int special) {
    bytes top = (bytes){0} - 60;
    for (int k = 0; k < count; k++) {
        bytes exponent = b_exponent[k] + j->a_table.exponent[a[k]];
        bytes above = exponent > top;
        top = (exponent & above) | (top & ~above);
    }
    floats up[VECTORS], down[VECTORS], plain[VECTORS];
    ints sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        few_bytes part;
        memcpy(&part, (const char *)&top + v * WIDTH, WIDTH);
        ints exponent = __builtin_convertvector(part, ints);
        ints running = (((ints)chain[v] >> 23) & 0xFF) - 127;
        ints above = running > exponent;
        exponent = (running & above) | (exponent & ~above);
        up[v] = (floats)((127 + FRACTION - exponent) << 23);
        down[v] = (floats)((127 - FRACTION + exponent) << 23);
        sum[v] = __builtin_convertvector(chain[v] * up[v], ints); /* toward zero */
        plain[v] = chain[v];
    }
    for (int k = 0; k < count; k++) {
        float value = j->a_table.value[a[k]];
        for (int v = 0; v < VECTORS; v++) {
            floats product = b[k * VECTORS + v] * value;
            sum[v] += __builtin_convertvector(product * up[v], ints);
            if (special) plain[v] += product;
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        ints bits = (ints)__builtin_convertvector(sum[v], floats) & ~(0x7FFFFF >> FRACTION);
        floats result = (floats)bits * down[v];
        if (special) { /* NaN and inf as IEEE has them; finite sums cannot overflow */
            ints finite = (plain[v] - plain[v]) == 0.0f;
            result = (floats)(((ints)result & finite) | ((ints)plain[v] & ~finite));
        }
        chain[v] = result;
    }
}

static inline __attribute__((always_inline)) void pass_panel(const job *j, int64_t first, int64_t last, int64_t row0,
                                                             int64_t rows, const float *b, const bytes *b_exponent,
                                                             const float *b_scale, sums *state, int special) {
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *a = j->a + (row0 + r) * j->k;
        sums now = state[r];
        for (int64_t s = first; s < last; s++) {
            int64_t at = j->start[s];
            const floats *b_at = (const floats *)(b + at * LANES);
            if (j->count[s] == GROUP)
                add_group(now.chain, a + at, b_at, b_exponent + at, GROUP, j, special);
            else
                add_group(now.chain, a + at, b_at, b_exponent + at, j->count[s], j, special);
            if (j->flags[s] & CHAIN_ENDS)
                for (int v = 0; v < VECTORS; v++) {
                    now.partial[v] += now.chain[v];
                    now.chain[v] = (floats){0};
                }
            if (j->scaling != UNSCALED && j->flags[s] & BLOCK_ENDS) {
                int64_t block = j->block[s];
                float s_a = j->a_scale[(row0 + r) * j->a_scale_row + block * j->a_scale_col];
                const float *s_b = b_scale + block * LANES;
                float *total = (float *)now.total, *p = (float *)now.partial;
                if (j->scaling == SCALES_ONE_BY_ONE)
                    for (int l = 0; l < LANES; l++) total[l] = __builtin_fmaf(p[l] * s_a, s_b[l], total[l]);
                else
                    for (int l = 0; l < LANES; l++) total[l] = __builtin_fmaf(p[l], s_a * s_b[l], total[l]);
                memset(now.partial, 0, sizeof now.partial);
            }
        }
        state[r] = now;
    }
}

/* 32 columns of b, decoded: [k, 32]; columns beyond n are zero. */
static void decode_columns(const job *j, int64_t col0, int64_t cols, float *b, int8_t *exponent, float *scale) {
    for (int64_t k = 0; k < j->k; k++)
        for (int64_t l = 0; l < LANES; l++) {
            uint8_t code = l < cols ? j->b[(col0 + l) * j->b_row + k * j->b_col] : 0;
            b[k * LANES + l] = j->b_table.value[code];
            exponent[k * LANES + l] = j->b_table.exponent[code];
        }
    if (j->scaling != UNSCALED)
        for (int64_t block = 0; block < j->blocks; block++)
            for (int64_t l = 0; l < LANES; l++)
                scale[block * LANES + l] = l < cols ? j->b_scale[(col0 + l) * j->b_scale_row + block * j->b_scale_col] : 1;
}

static void *scratch(int64_t size) { return aligned_alloc(64, (size_t)((size + 64) / 64 * 64)); }

static void *work(void *argument) {
    job *j = argument;
    float *b = scratch(j->k * LANES * 4), *b_scale = scratch(j->blocks * LANES * 4);
    int8_t *b_exponent = scratch(j->k * LANES);
    sums *state = scratch(ROWS * sizeof(sums));
    if (!b || !b_scale || !b_exponent || !state) __atomic_store_n(&j->failed, 1, __ATOMIC_RELAXED);
    int64_t row_items = (j->m + ROWS - 1) / ROWS, items = row_items * ((j->n + LANES - 1) / LANES), decoded = -1;
    while (!__atomic_load_n(&j->failed, __ATOMIC_RELAXED)) {
        int64_t item = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (item >= items) break;
        int64_t col0 = item / row_items * LANES, cols = smaller(LANES, j->n - col0);
        int64_t row0 = item % row_items * ROWS, rows = smaller(ROWS, j->m - row0);
        if (decoded != col0) decode_columns(j, decoded = col0, cols, b, b_exponent, b_scale);
        memset(state, 0, rows * sizeof(sums));
        for (int64_t first = 0; first < j->steps; first += PANEL) {
            int64_t last = smaller(first + PANEL, j->steps);
            if (j->special)
                pass_panel(j, first, last, row0, rows, b, (bytes *)b_exponent, b_scale, state, 1);
            else
                pass_panel(j, first, last, row0, rows, b, (bytes *)b_exponent, b_scale, state, 0);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float *sum = (const float *)(j->scaling == UNSCALED ? state[r].partial : state[r].total);
            float *out = j->out + (row0 + r) * j->n + col0;
            for (int64_t l = 0; l < cols; l++) out[l] = sum[l] == sum[l] ? sum[l] : __builtin_nanf("");
        }
    }
    free(b), free(b_scale), free(b_exponent), free(state);
    return NULL;
}

/* Computes a job with up to `threads` threads, the caller's included. Returns 0, or 1 where memory ran out. */
int dsv3fp8_emulated_gemm(job *j, int threads) {
    pthread_t started[MAX_THREADS];
    int count = 0;
    while (count < threads - 1 && count < MAX_THREADS && !pthread_create(&started[count], NULL, work, j)) count++;
    work(j);
    for (int t = 0; t < count; t++) pthread_join(started[t], NULL);
    return j->failed;
}
