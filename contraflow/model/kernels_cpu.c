/* What lies between matrix products when tokens are generated on one CPU core: queries, keys and values put in place;
 * attention of one new token of each sequence; a mixture's experts over few rows each.
 *
 * A cache layer is float [NB][2][G][BS][d]: of each block the keys, then the values, head by head, so that a head's keys
 * lie together and are read where they are. fp32. What is no number stays no number: no -ffinite-math-only.
 *
 * Shape letters: T tokens, B sequences, N blocks of a table, H query heads, G key/value heads, s = H / G, d head
 * dimension, r dimensions that turn, BS tokens of a block; D width, F hidden width of an expert, E experts, K of them a
 * token. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
#define AT(p) (*(const Loose *)(p))
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Whole){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

struct Shape { int64_t tokens, heads, groups, dim, turned, block_tokens, width, stride; };

/* exp(x) of x <= 0 to 2 ulp (Cephes' polynomial); 0 below -87. */
INLINE Lanes exponential(Lanes x) {
    Lanes shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number, in the low bits */
    Lanes n = shifted - 12582912.0f, rest = x - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    Whole scale = (((Whole)shifted - 0x4B400000) + 127) << 23;
    return (Lanes)((Whole)(y * (Lanes)scale) & ~(x < -87.0f));
}

/* The sum of each of eight vectors' lanes. */
INLINE Lanes sums(const Lanes *x) {
    Lanes two[4], four[2];
    for (int i = 0; i < 4; i++)
        two[i] = PICK(x[2 * i], x[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                 PICK(x[2 * i], x[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        four[i] = PICK(two[2 * i], two[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  PICK(two[2 * i], two[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE Lanes larger(Lanes a, Lanes b) {
    Whole yes = a > b;
    return (Lanes)(((Whole)a & yes) | ((Whole)b & ~yes));
}

INLINE float product(const float *x, const float *y, int64_t count) {
    Lanes sum = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum += AT(x + i) * AT(y + i);
    for (; i < count; i++) rest += x[i] * y[i];
    for (int j = 0; j < LANES; j++) rest += sum[j];
    return rest;
}

/* Products of a query with eight keys that lie one behind the other. */
INLINE void products(const float *q, const float *keys, int64_t dim, float *out) {
    Lanes each[LANES] = {{0}};
    for (int64_t i = 0; i + LANES <= dim; i += LANES) {
        Lanes part = AT(q + i);
        for (int t = 0; t < LANES; t++) each[t] += part * AT(keys + t * dim + i);
    }
    Lanes all = sums(each);
    for (int64_t i = dim / LANES * LANES; i < dim; i++)
        for (int t = 0; t < LANES; t++) all[t] += q[i] * keys[t * dim + i];
    memcpy(out, &all, sizeof all);
}

/* out [d] += the sum of `count` rows [d], each times its weight. */
INLINE void add_rows(const float *weights, const float *rows, int64_t count, int64_t dim, float *out) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        Lanes sum[4];
        memcpy(sum, out + i, sizeof sum);
        for (int64_t t = 0; t < count; t++)
            for (int j = 0; j < 4; j++) sum[j] += weights[t] * AT(rows + t * dim + i + j * LANES);
        memcpy(out + i, sum, sizeof sum);
    }
    for (; i < dim; i++)
        for (int64_t t = 0; t < count; t++) out[i] += weights[t] * rows[t * dim + i];
}

/* `count` scores, with room for a whole number of LANES, become weights that sum, with the sink's share, to 1. */
INLINE void weigh(float *scores, int64_t count, float scale, const float *sink) {
    Lanes tops = (Lanes){0} - INFINITY, sum = {0};
    for (int64_t t = count; t % LANES; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < count; t += LANES) {
        Lanes score = AT(scores + t) * scale;
        memcpy(scores + t, &score, sizeof score);
        tops = larger(score, tops);
    }
    float top = sink ? *sink : -INFINITY, total = 0;
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t t = 0; t < count; t += LANES) {
        Lanes weight = exponential(AT(scores + t) - top);
        memcpy(scores + t, &weight, sizeof weight);
        sum += weight;
    }
    for (int i = 0; i < LANES; i++) total += sum[i];
    if (sink) total += expf(*sink - top);
    for (int64_t t = 0; t < count; t++) scores[t] *= 1.0f / total;
}

INLINE void fetch(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

/* The s query heads of one key/value head of one sequence, over positions [first, length). Each page is asked of memory
 * while the one before is worked on; behind the last, what is at `ahead`. */
static void head(const float *q, const float *pages, const int64_t *table, int64_t first, int64_t length,
                 const struct Shape *shape, const float *sinks, const float *ahead, float *scores, float *out) {
    int64_t dim = shape->dim, bs = shape->block_tokens, share = shape->heads / shape->groups;
    int64_t block = 2 * shape->groups * bs * dim, room = shape->width * bs + LANES;
    float scale = 1.0f / sqrtf((float)dim);
    const float *first_values = pages + table[first / bs] * block + block / 2;
    for (int64_t at = first, end; at < length; at = end) {
        end = (at / bs + 1) * bs < length ? (at / bs + 1) * bs : length;
        const float *keys = pages + table[at / bs] * block + at % bs * dim;
        fetch(end < length ? pages + table[end / bs] * block : first_values, bs * dim);
        for (int64_t s = 0; s < share; s++) {
            float *to = scores + s * room + at - first;
            int64_t t = 0;
            for (; t + LANES <= end - at; t += LANES) products(q + s * dim, keys + t * dim, dim, to + t);
            for (; t < end - at; t++) to[t] = product(q + s * dim, keys + t * dim, dim);
        }
    }
    for (int64_t s = 0; s < share; s++) weigh(scores + s * room, length - first, scale, sinks ? sinks + s : 0);
    memset(out, 0, (size_t)(share * dim) * sizeof *out);
    for (int64_t at = first, end; at < length; at = end) {
        end = (at / bs + 1) * bs < length ? (at / bs + 1) * bs : length;
        const float *values = pages + table[at / bs] * block + block / 2 + at % bs * dim;
        fetch(end < length ? pages + table[end / bs] * block + block / 2 : ahead, bs * dim);
        for (int64_t s = 0; s < share; s++)
            add_rows(scores + s * room + at - first, values, end - at, dim, out + s * dim);
    }
}

/* Attention of one token a sequence: q, out [B][H][d]; tables [B], rows `stride` apart; window 0: all is seen;
 * sinks [H] or null; scores: room for s * (width * BS + 8). A sequence of length 0 gives zeros. */
void decode(const float *q, const float *layer, const int64_t *tables, const int64_t *lengths, const float *sinks,
            int64_t window, float *scores, float *out, const struct Shape *shape) {
    int64_t dim = shape->dim, groups = shape->groups, share = shape->heads / groups;
    for (int64_t b = 0; b < shape->tokens; b++) {
        const int64_t *table = tables + b * shape->stride, *after = b + 1 < shape->tokens ? table + shape->stride : table;
        int64_t length = lengths[b], first = window && length > window ? length - window : 0;
        int64_t group = shape->block_tokens * dim; /* floats from one head's keys in a block to the next one's */
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = (b * groups + g) * share;
            const float *mine = layer + g * group;
            const float *ahead = g + 1 < groups ? mine + group + table[0] * 2 * groups * group
                                                : layer + after[0] * 2 * groups * group;
            head(q + at * dim, mine, table, first, length, shape, sinks ? sinks + g * share : 0, ahead, scores,
                 out + at * dim);
        }
    }
}

INLINE float gain(const float *x, int64_t count, float eps) {
    return 1.0f / sqrtf(product(x, x, count) / (float)count + eps);
}

INLINE void clamp(float *x, int64_t count, float clip) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = x[i] > clip ? clip : x[i];
        x[i] = x[i] < -clip ? -clip : x[i];
    }
}

/* Norm (kind 0: none; 1: each head, norm [2][d]; 2: all heads of a kind together, norm [H + G][d]), clamp (clip 0:
 * none), turn by cos and signed sin [T][r]. qkv [T][H + 2 * G][d] is written over; queries go to q [T][H][d], keys and
 * values to their tokens' slots (block * BS + offset) of the layer. */
void place(float *qkv, const float *cos, const float *sin, const float *norm, int64_t kind, float eps, float clip,
           const int64_t *slots, float *q, float *layer, const struct Shape *shape) {
    int64_t heads = shape->heads, groups = shape->groups, dim = shape->dim, turned = shape->turned, half = turned / 2;
    int64_t bs = shape->block_tokens;
    for (int64_t t = 0; t < shape->tokens; t++) {
        float *row = qkv + t * (heads + 2 * groups) * dim;
        float all[2] = {1, 1};
        if (kind == 2) {
            all[0] = gain(row, heads * dim, eps);
            all[1] = gain(row + heads * dim, groups * dim, eps);
        }
        float *page = layer + (slots[t] / bs * 2 * groups * bs + slots[t] % bs) * dim;
        for (int64_t h = 0; h < heads + 2 * groups; h++) {
            int is_key = h >= heads, is_value = h >= heads + groups;
            float *restrict x = row + h * dim;
            float *restrict to = is_key ? page + (h - heads) * bs * dim : q + (t * heads + h) * dim;
            if (!is_value && kind) {
                const float *weight = norm + (kind == 1 ? is_key : h) * dim;
                float by = kind == 1 ? gain(x, dim, eps) : all[is_key];
                for (int64_t i = 0; i < dim; i++) x[i] *= by * weight[i];
            }
            if (clip > 0) clamp(x, dim, clip);
            int64_t kept = is_value ? 0 : turned;
            const float *restrict c = cos + t * turned, *restrict s = sin + t * turned;
            for (int64_t i = 0; i < kept / 2; i++) {
                float low = x[i], high = x[i + half];
                to[i] = low * c[i] + high * s[i];
                to[i + half] = high * c[i + half] + low * s[i + half];
            }
            memcpy(to + kept, x + kept, (size_t)(dim - kept) * sizeof *to);
        }
    }
}

struct Mixture { int64_t tokens, choices, experts, dim, ffn; };

/* Two rows times each of four that lie one behind the other: the first row's four products, then the second's. */
INLINE Lanes two_by_four(const float *a, const float *b, const float *rows, int64_t count) {
    Lanes each[LANES] = {{0}};
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes x = AT(a + i), y = AT(b + i);
        for (int j = 0; j < 4; j++) {
            Lanes row = AT(rows + j * count + i);
            each[j] += x * row;
            each[4 + j] += y * row;
        }
    }
    return sums(each);
}

INLINE Lanes silu(Lanes x) {
    Whole negative = x < 0.0f;
    Lanes small = exponential(-larger(x, -x)), one = (Lanes){0} + 1.0f;
    Lanes over = (Lanes)(((Whole)small & negative) | ((Whole)one & ~negative));
    return x * over / (1.0f + small);
}

/* The n rows of one expert: pairs[i] is token * K + choice. */
static void expert(const float *x, const int64_t *pairs, int64_t n, const float *weights, const float *gate_up,
                   const float *down, float *hidden, float *out, const struct Mixture *mix) {
    int64_t dim = mix->dim, ffn = mix->ffn, choices = mix->choices;
    for (int64_t f = 0; f < ffn; f += 4) /* each weight comes from memory once, rows stay near */
        for (int64_t i = 0; i < n; i += 2) {
            int64_t j = i + 1 < n ? i + 1 : i;
            const float *a = x + pairs[i] / choices * dim, *b = x + pairs[j] / choices * dim;
            Lanes gate = two_by_four(a, b, gate_up + f * dim, dim);
            Lanes both = silu(gate) * two_by_four(a, b, gate_up + (ffn + f) * dim, dim);
            memcpy(hidden + j * ffn + f, (float *)&both + 4, 16); /* of an odd last row the same twice */
            memcpy(hidden + i * ffn + f, &both, 16);
        }
    for (int64_t d = 0; d < dim; d += 4)
        for (int64_t i = 0; i < n; i += 2) {
            int64_t j = i + 1 < n ? i + 1 : i;
            Lanes both = two_by_four(hidden + i * ffn, hidden + j * ffn, down + d * ffn, ffn);
            float *to = out + pairs[i] / choices * dim + d, *next = out + pairs[j] / choices * dim + d;
            for (int k = 0; k < 4; k++) to[k] += weights[pairs[i]] * both[k];
            for (int k = 0; k < 4 && j > i; k++) next[k] += weights[pairs[j]] * both[4 + k];
        }
}

/* A mixture of SwiGLU experts: x, out [T][D]; ids (below 0: none), weights [T][K]; gate_up [E][2 * F][D]; down [E][D][F].
 * D and F are multiples of 8. Scratch: hidden [T * K][F], order [T * K + E + 1]. */
void experts(const float *x, const int64_t *ids, const float *weights, const float *gate_up, const float *down,
             float *hidden, int64_t *order, float *out, const struct Mixture *mix) {
    int64_t pairs = mix->tokens * mix->choices, dim = mix->dim, ffn = mix->ffn;
    int64_t *ends = order + pairs; /* of each expert's pairs, once they are sorted; behind a place for none */
    memset(ends, 0, (size_t)(mix->experts + 1) * sizeof *ends);
    memset(out, 0, (size_t)(mix->tokens * dim) * sizeof *out);
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0) ends[ids[p] + 1]++;
    for (int64_t e = 0; e < mix->experts; e++) ends[e + 1] += ends[e];
    for (int64_t p = 0; p < pairs; p++) /* leaves in ends[e] where expert e ends */
        if (ids[p] >= 0) order[ends[ids[p]]++] = p;
    for (int64_t e = 0, begin = 0; e < mix->experts; begin = ends[e++])
        expert(x, order + begin, ends[e] - begin, weights, gate_up + e * 2 * ffn * dim, down + e * dim * ffn, hidden, out,
               mix);
}
