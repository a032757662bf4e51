/* Batch-invariant forward arithmetic on one CPU core: what comes out for a row depends on that row and on nothing else,
 * neither on how many rows there are, nor on its place among them, nor on how a sequence was cut or where it is cached.
 *
 * Every number is made by operations whose order is fixed by its own row: dot products in LANES partial sums that are
 * folded in one way, sums over positions in order of position. Rounding is fixed too: fused multiply-adds are written
 * out and the compiler is told to make no others (-ffp-contract=off); what is no whole number of lanes is padded with
 * zeros and goes the same way. exp, cos and sin are scalar or this file's own. fp32. No number is lost to fast maths.
 *
 * Shape letters: T tokens or rows, N outputs, K inputs, S sequences, H query heads, G key/value heads, s = H / G, d head
 * dimension, r dimensions that turn, BS tokens of a block; D width, F hidden width of an expert, E experts, C choices of
 * a token; V vocabulary. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define ROWS 32 /* worked on together, so that they stay near while weights pass by */
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

#if defined(__FMA__) && defined(__AVX__)
#include <immintrin.h>
INLINE Lanes fused(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

INLINE Lanes all(float x) { return (Lanes){x, x, x, x, x, x, x, x}; }

/* The first `count` of LANES numbers, then zeros (or `rest`). */
INLINE Lanes some(const float *p, int64_t count, float rest) {
    Lanes x = all(rest);
    for (int64_t i = 0; i < count; i++) x[i] = p[i];
    return x;
}

INLINE Lanes larger(Lanes a, Lanes b) {
    Whole yes = a > b;
    return (Lanes)(((Whole)a & yes) | ((Whole)b & ~yes));
}

/* Lane by lane in one order: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), as `folds` does. */
INLINE float fold(Lanes x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

/* `fold` of each of eight vectors. */
INLINE Lanes folds(const Lanes *x) {
    Lanes two[4], four[2];
    for (int i = 0; i < 4; i++)
        two[i] = PICK(x[2 * i], x[2 * i + 1], 0, 2, 8, 10, 4, 6, 12, 14) +
                 PICK(x[2 * i], x[2 * i + 1], 1, 3, 9, 11, 5, 7, 13, 15);
    for (int i = 0; i < 2; i++)
        four[i] = PICK(two[2 * i], two[2 * i + 1], 0, 2, 8, 10, 4, 6, 12, 14) +
                  PICK(two[2 * i], two[2 * i + 1], 1, 3, 9, 11, 5, 7, 13, 15);
    return PICK(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* exp(x) of x <= 0 to 2 ulp (Cephes' polynomial); 0 below -87. */
INLINE Lanes exponential(Lanes x) {
    Lanes shifted = fused(x, all(1.44269504f), all(12582912.0f)); /* 1.5 * 2^23: rounds to a whole number, in the low bits */
    Lanes n = shifted - 12582912.0f, rest = fused(n, all(-0.693359375f), x);
    rest = fused(n, all(2.12194440e-4f), rest);
    Lanes y = fused(rest, all(1.9875691500e-4f), all(1.3981999507e-3f));
    y = fused(y, rest, all(8.3334519073e-3f));
    y = fused(y, rest, all(4.1665795894e-2f));
    y = fused(y, rest, all(1.6666665459e-1f));
    y = fused(y, rest, all(5.0000001201e-1f));
    y = fused(y * rest, rest, rest) + 1.0f;
    Whole scale = (((Whole)shifted - 0x4B400000) + 127) << 23;
    return (Lanes)((Whole)(y * (Lanes)scale) & ~(x < -87.0f));
}

INLINE Lanes silu(Lanes x) {
    Whole negative = x < 0.0f;
    Lanes small = exponential(-larger(x, -x));
    Lanes over = (Lanes)(((Whole)small & negative) | ((Whole)all(1.0f) & ~negative));
    return x * over / (1.0f + small);
}

/* Products of eight pairs of rows [count], a[i / wide] with b[i % wide]; wide is 4 or 8. */
INLINE Lanes eight(const float *const *a, const float *const *b, int wide, int64_t count) {
    Lanes each[LANES] = {{0}};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES)
        for (int i = 0; i < LANES; i++) each[i] = fused(AT(a[i / wide] + k), AT(b[i % wide] + k), each[i]);
    if (k < count)
        for (int i = 0; i < LANES; i++)
            each[i] = fused(some(a[i / wide] + k, count - k, 0), some(b[i % wide] + k, count - k, 0), each[i]);
    return folds(each);
}

/* to[t][N] = rows[t][K] times weights [N][K], plus the bias [N] unless it is null. At most ROWS rows. */
static void project(const float *const *rows, int64_t count, const float *weights, const float *bias, int64_t outputs,
                    int64_t inputs, float *const *to) {
    for (int64_t n = 0; n < outputs; n += 4) {
        int64_t four = outputs - n < 4 ? outputs - n : 4;
        const float *each[4];
        for (int64_t j = 0; j < 4; j++) each[j] = weights + (n + (j < four ? j : four - 1)) * inputs;
        Lanes more = {0};
        if (bias)
            for (int64_t j = 0; j < four; j++) more[j] = more[4 + j] = bias[n + j];
        for (int64_t t = 0; t < count; t += 2) {
            int64_t two = t + 1 < count ? 2 : 1;
            const float *pair[2] = {rows[t], rows[t + two - 1]};
            Lanes found = eight(pair, each, 4, inputs);
            if (bias) found += more;
            if (four == 4) {
                memcpy(to[t] + n, &found, 16);
                if (two == 2) memcpy(to[t + 1] + n, (float *)&found + 4, 16);
            } else
                for (int64_t i = 0; i < two; i++)
                    for (int64_t j = 0; j < four; j++) to[t + i][n + j] = found[4 * i + j];
        }
    }
}

/* out [T][N] = x [T][K] times weights [N][K], plus bias [N] or null; rows of x lie `stride` apart. */
void linear(const float *x, int64_t stride, const float *weights, const float *bias, int64_t tokens, int64_t outputs,
            int64_t inputs, float *out) {
    for (int64_t begin = 0; begin < tokens; begin += ROWS) {
        int64_t count = tokens - begin < ROWS ? tokens - begin : ROWS;
        const float *rows[ROWS];
        float *to[ROWS];
        for (int64_t t = 0; t < count; t++) {
            rows[t] = x + (begin + t) * stride;
            to[t] = out + (begin + t) * outputs;
        }
        project(rows, count, weights, bias, outputs, inputs, to);
    }
}

INLINE float gain(const float *x, int64_t count, float eps) {
    Lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = fused(AT(x + i), AT(x + i), sum);
    Lanes rest = some(x + i, count - i, 0);
    return 1.0f / sqrtf(fold(fused(rest, rest, sum)) / (float)count + eps);
}

/* out [T][D] = x / sqrt(mean(x^2) + eps) * weight [D]. */
void norm(const float *x, const float *weight, float eps, int64_t tokens, int64_t dim, float *out) {
    for (int64_t t = 0; t < tokens; t++, x += dim, out += dim) {
        float by = gain(x, dim, eps);
        for (int64_t i = 0; i < dim; i++) out[i] = x[i] * by * weight[i];
    }
}

/* out [T][F] = silu(gate) * up of x [T][2 * F]. */
void swiglu(const float *x, int64_t tokens, int64_t ffn, float *out) {
    for (int64_t t = 0; t < tokens; t++, x += 2 * ffn, out += ffn) {
        int64_t f = 0;
        for (; f + LANES <= ffn; f += LANES) {
            Lanes both = silu(AT(x + f)) * AT(x + ffn + f);
            memcpy(out + f, &both, sizeof both);
        }
        Lanes both = silu(some(x + f, ffn - f, 0)) * some(x + ffn + f, ffn - f, 0);
        for (int64_t i = 0; f < ffn; i++, f++) out[f] = both[i];
    }
}

struct Soft { float top, sum; };

/* weights [count] = exp(x * scale - the largest of them), what they sum to, and that largest. x and weights may be one. */
INLINE struct Soft soften(const float *x, int64_t count, float scale, float *weights) {
    Lanes tops = all(-INFINITY), sum = {0};
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) tops = larger(AT(x + i) * scale, tops);
    float top = -INFINITY;
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t i = whole; i < count; i++) top = x[i] * scale > top ? x[i] * scale : top;
    for (int64_t i = 0; i < whole; i += LANES) {
        Lanes weight = exponential(AT(x + i) * scale - top);
        memcpy(weights + i, &weight, sizeof weight);
        sum += weight;
    }
    if (whole < count) {
        Lanes weight = exponential(some(x + whole, count - whole, -INFINITY) * scale - top);
        for (int64_t i = whole; i < count; i++) weights[i] = weight[i - whole];
        sum += weight;
    }
    return (struct Soft){top, fold(sum)};
}

/* out [T][N] = softmax of each row of x [T][N]. */
void softmax(const float *x, int64_t tokens, int64_t count, float *out) {
    for (int64_t t = 0; t < tokens; t++, x += count, out += count) {
        float by = 1.0f / soften(x, count, 1, out).sum;
        for (int64_t i = 0; i < count; i++) out[i] *= by;
    }
}

/* cos and sin [T][r] of positions [T] times signed radians [r], times the gain. */
void rotation(const int64_t *positions, const float *radians, float by, int64_t tokens, int64_t turned, float *cos,
              float *sin) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < turned; i++) {
            float angle = (float)positions[t] * radians[i];
            cos[t * turned + i] = cosf(angle) * by;
            sin[t * turned + i] = sinf(angle) * by;
        }
}

struct Heads { int64_t tokens, heads, groups, dim, turned, kind; float eps, clip; };

/* Queries and keys of qkv [T][H + 2 * G][d], in place: normed (kind 0: not; 1: each head, norm [2][d]; 2: all heads of a
 * sort together, norm [H + G][d]), clamped (clip 0: not; values too), turned by cos and signed sin [T][r]. */
void heads(float *qkv, const float *norm, const float *cos, const float *sin, const struct Heads *shape) {
    int64_t heads = shape->heads, groups = shape->groups, dim = shape->dim, half = shape->turned / 2;
    for (int64_t t = 0; t < shape->tokens; t++) {
        float *row = qkv + t * (heads + 2 * groups) * dim, together[2] = {1, 1};
        if (shape->kind == 2) {
            together[0] = gain(row, heads * dim, shape->eps);
            together[1] = gain(row + heads * dim, groups * dim, shape->eps);
        }
        for (int64_t h = 0; h < heads + 2 * groups; h++) {
            int is_key = h >= heads, is_value = h >= heads + groups;
            float *x = row + h * dim;
            if (!is_value && shape->kind) {
                const float *weight = norm + (shape->kind == 1 ? is_key : h) * dim;
                float by = shape->kind == 1 ? gain(x, dim, shape->eps) : together[is_key];
                for (int64_t i = 0; i < dim; i++) x[i] = x[i] * by * weight[i];
            }
            if (shape->clip > 0)
                for (int64_t i = 0; i < dim; i++) {
                    x[i] = x[i] > shape->clip ? shape->clip : x[i];
                    x[i] = x[i] < -shape->clip ? -shape->clip : x[i];
                }
            const float *c = cos + t * shape->turned, *s = sin + t * shape->turned;
            for (int64_t i = 0; i < half && !is_value; i++) {
                float low = x[i], high = x[i + half];
                x[i] = fmaf(high, s[i], low * c[i]);
                x[i + half] = fmaf(low, s[i + half], high * c[i + half]);
            }
        }
    }
}

/* Keys and values of qkv [T][H + 2 * G][d] go to their slots (block * BS + offset) of a layer [NB][2][G][BS][d], queries
 * to q [T][H][d]. */
void store(const float *qkv, const int64_t *slots, int64_t bs, float *q, float *layer, const struct Heads *shape) {
    int64_t heads = shape->heads, groups = shape->groups, dim = shape->dim;
    for (int64_t t = 0; t < shape->tokens; t++) {
        const float *row = qkv + t * (heads + 2 * groups) * dim;
        memcpy(q + t * heads * dim, row, (size_t)(heads * dim) * sizeof *q);
        float *to = layer + (slots[t] / bs * 2 * groups * bs + slots[t] % bs) * dim;
        for (int64_t g = 0; g < 2 * groups; g++)
            memcpy(to + g * bs * dim, row + (heads + g) * dim, (size_t)dim * sizeof *q);
    }
}

/* The s heads of one query [s][d] over `count` keys and values in order of position: out [s][d]. `scores` has room for
 * count + LANES. */
static void over(const float *q, const float *const *keys, const float *const *values, int64_t count, int64_t share,
                 int64_t dim, float *scores, float *out) {
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t s = 0; s < share; s++, q += dim, out += dim) {
        for (int64_t t = 0; t < count; t += LANES) { /* behind the last, pointers go on: to keys that are not used */
            Lanes found = eight(&q, keys + t, 8, dim);
            memcpy(scores + t, &found, sizeof found);
        }
        float by = 1.0f / soften(scores, count, scale, scores).sum;
        int64_t i = 0;
        for (; i + 4 * LANES <= dim; i += 4 * LANES) {
            Lanes sum[4] = {{0}};
            for (int64_t t = 0; t < count; t++)
                for (int j = 0; j < 4; j++) sum[j] = fused(all(scores[t]), AT(values[t] + i + j * LANES), sum[j]);
            for (int j = 0; j < 4; j++) sum[j] *= by;
            memcpy(out + i, sum, sizeof sum);
        }
        for (; i < dim; i++) {
            float sum = 0;
            for (int64_t t = 0; t < count; t++) sum = fmaf(scores[t], values[t][i], sum);
            out[i] = sum * by;
        }
    }
}

/* Pointers behind the last of `count` keys that may be followed. */
INLINE void finish(const float **keys, int64_t count) {
    for (int64_t t = count; t < count + LANES; t++) keys[t] = keys[count - 1];
}

struct Attention { int64_t sequences, heads, groups, dim, stride, block_tokens, width; };

/* Causal attention of S whole sequences that lie end to end: sequence i is tokens [starts[i], starts[i + 1]) of q, k and
 * v, whose tokens lie `stride` apart; out [T][H][d]. Scratch: keys, values and scores for the longest and LANES more. */
void packed(const float *q, const float *k, const float *v, const int32_t *starts, const float **keys,
            const float **values, float *scores, float *out, const struct Attention *shape) {
    int64_t dim = shape->dim, share = shape->heads / shape->groups, stride = shape->stride;
    for (int64_t i = 0; i < shape->sequences; i++)
        for (int64_t g = 0; g < shape->groups; g++) {
            int64_t begin = starts[i], length = starts[i + 1] - begin;
            for (int64_t t = 0; t < length; t++) {
                keys[t] = k + (begin + t) * stride + g * dim;
                values[t] = v + (begin + t) * stride + g * dim;
            }
            finish(keys, length);
            for (int64_t t = 0; t < length; t++)
                over(q + (begin + t) * stride + g * share * dim, keys, values, t + 1, share, dim, scores,
                     out + ((begin + t) * shape->heads + g * share) * dim);
        }
}

/* New tokens of sequences whose keys and values a layer [NB][2][G][BS][d] holds: q, out [T][H][d]; tables [S], rows
 * `stride` apart; lengths [S] with the new ones; queries [S][width]: which tokens are new of each, in order, the first
 * counts[S] of them. Null queries: one of each, in order. A sequence of length 0 gives zeros. Scratch as `packed`'s. */
void paged(const float *q, const float *layer, const int64_t *tables, const int64_t *lengths, const int64_t *queries,
           const int64_t *counts, const float **keys, const float **values, float *scores, float *out,
           const struct Attention *shape) {
    int64_t dim = shape->dim, heads = shape->heads, share = heads / shape->groups, bs = shape->block_tokens;
    for (int64_t i = 0; i < shape->sequences; i++)
        for (int64_t g = 0; g < shape->groups; g++) {
            const int64_t *table = tables + i * shape->stride;
            int64_t length = lengths[i], fed = queries ? counts[i] : 1;
            for (int64_t t = 0; t < length; t++) {
                keys[t] = layer + ((table[t / bs] * 2 * shape->groups + g) * bs + t % bs) * dim;
                values[t] = keys[t] + shape->groups * bs * dim;
            }
            if (length) finish(keys, length);
            for (int64_t j = 0; j < fed; j++) {
                int64_t at = ((queries ? queries[i * shape->width + j] : i) * heads + g * share) * dim;
                if (length)
                    over(q + at, keys, values, length - fed + j + 1, share, dim, scores, out + at);
                else
                    memset(out + at, 0, (size_t)(share * dim) * sizeof *out);
            }
        }
}

struct Mixture { int64_t tokens, choices, experts, dim, ffn; };

/* The sum of each token's SwiGLU experts by weight, in order of choice: x, out [T][D]; ids (below 0: none) and weights
 * [T][C]; gate_up [E][2 * F][D]; down [E][D][F]. Scratch: wide [ROWS][2 * F], hidden [ROWS][F], answers [T * C][D],
 * order [T * C + E + 1]. */
void experts(const float *x, const int64_t *ids, const float *weights, const float *gate_up, const float *down,
             float *wide, float *hidden, float *answers, int64_t *order, float *out, const struct Mixture *mix) {
    int64_t pairs = mix->tokens * mix->choices, dim = mix->dim, ffn = mix->ffn;
    int64_t *ends = order + pairs; /* of each expert's pairs, once they are sorted; behind a place for none */
    memset(ends, 0, (size_t)(mix->experts + 1) * sizeof *ends);
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0) ends[ids[p] + 1]++;
    for (int64_t e = 0; e < mix->experts; e++) ends[e + 1] += ends[e];
    for (int64_t p = 0; p < pairs; p++) /* leaves in ends[e] where expert e ends */
        if (ids[p] >= 0) order[ends[ids[p]]++] = p;
    for (int64_t e = 0, begin = 0; e < mix->experts; e++)
        while (begin < ends[e]) {
            int64_t count = ends[e] - begin < ROWS ? ends[e] - begin : ROWS;
            const float *rows[ROWS], *middle[ROWS];
            float *to[ROWS], *last[ROWS];
            for (int64_t i = 0; i < count; i++) {
                rows[i] = x + order[begin + i] / mix->choices * dim;
                to[i] = wide + i * 2 * ffn;
                middle[i] = hidden + i * ffn;
                last[i] = answers + order[begin + i] * dim;
            }
            project(rows, count, gate_up + e * 2 * ffn * dim, 0, 2 * ffn, dim, to);
            swiglu(wide, count, ffn, hidden);
            project(middle, count, down + e * dim * ffn, 0, dim, ffn, last);
            begin += count;
        }
    memset(out, 0, (size_t)(mix->tokens * dim) * sizeof *out);
    for (int64_t p = 0; p < pairs; p++) {
        const float *restrict answer = answers + p * dim;
        float *restrict to = out + p / mix->choices * dim;
        for (int64_t d = 0; d < dim && ids[p] >= 0; d++) to[d] = fmaf(weights[p], answer[d], to[d]);
    }
}

INLINE float logprob(float logit, float scale, struct Soft soft) {
    return logit * scale - soft.top - (float)log((double)soft.sum);
}

/* Of each row of logits [T][V] times the scale: the target's log-probability, and the entropy. Scratch: room [V]. */
void logprobs(const float *logits, const int64_t *targets, float scale, int64_t tokens, int64_t vocab, float *room,
              float *out, float *entropy) {
    for (int64_t t = 0; t < tokens; t++, logits += vocab) {
        struct Soft soft = soften(logits, vocab, scale, room);
        out[t] = logprob(logits[targets[t]], scale, soft);
        double mean = 0;
        for (int64_t v = 0; v < vocab; v++)
            if (room[v] > 0) mean += (double)room[v] * ((double)logits[v] * scale - soft.top);
        entropy[t] = (float)(log((double)soft.sum) - mean / soft.sum);
    }
}

/* A token of each row of logits [T][V] times scales [T], and its log-probability: the largest logit where greedy [T] (or
 * null: nowhere), else the first whose running sum of the softmax exceeds uniforms [T]. Scratch: room [V]. */
void sample(const float *logits, const float *scales, const uint8_t *greedy, const float *uniforms, int64_t tokens,
            int64_t vocab, float *room, int64_t *out, float *found) {
    for (int64_t t = 0; t < tokens; t++, logits += vocab) {
        struct Soft soft = soften(logits, vocab, scales[t], room);
        int64_t token = 0;
        if (greedy && greedy[t]) {
            for (int64_t v = 1; v < vocab; v++) token = logits[v] > logits[token] ? v : token;
        } else {
            float total = 0, sum = 0;
            for (int64_t v = 0; v < vocab; v++) total += room[v];
            float goal = uniforms[t] * total;
            for (; token < vocab - 1; token++) /* past the end only when no number */
                if ((sum += room[token]) > goal) break;
        }
        out[t] = token;
        found[t] = logprob(logits[token], scales[t], soft);
    }
}
