/* Resizes lines of pixels as torch does, and the memory that a thread keeps for it.

   The pixels are those of torch's antialiased bilinear interpolation of uint8
   (ATen/native/cpu/UpSampleKernelAVXAntialias.h): first across, then down, with weights
   of 16 bits, and a rounded byte in between. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Bytes that vector instructions may read or write behind what they work on. */
#define PAD 64
/* How many taps are worked on at once; the weights of the others are 0. */
#define TAPS 4

/* Which pixels of a line make each pixel of a shorter or longer line, and their weights:
   `taps` for each, of which the last may be 0. */
typedef struct {
    int32_t *first;
    int16_t *weights;
    size_t taps, size;
    int precision;
} Line;

/* Memory that a thread keeps for its next photographs: taking a megabyte from the
   system each time makes threads wait for one another there. */
typedef struct {
    void *memory;
    size_t size;
} Scratch;

enum { DECODED, ACROSS, FIRST_X, WEIGHTS_X, FIRST_Y, WEIGHTS_Y, EXACT, SCRATCHES };

typedef struct {
    Scratch each[SCRATCHES];
} Kept;

static pthread_key_t kept_key;

static void
release(void *memory)
{
    Kept *kept = memory;
    for (int at = 0; at < SCRATCHES; at++) {
        free(kept->each[at].memory);
    }
    free(kept);
}

static Kept *
kept_by_this_thread(void)
{
    Kept *kept = pthread_getspecific(kept_key);
    if (kept == NULL) {
        kept = calloc(1, sizeof *kept);
        if (kept != NULL && pthread_setspecific(kept_key, kept) != 0) {
            free(kept);
            kept = NULL;
        }
    }
    return kept;
}

/* Memory for `size` bytes and the padding; NULL if there is none. */
static void *
scratch(Kept *kept, int which, size_t size)
{
    Scratch *one = &kept->each[which];
    if (one->size < size + PAD) {
        free(one->memory);
        one->size = size + size / 4 + PAD;
        one->memory = malloc(one->size);
        if (one->memory == NULL) {
            one->size = 0;
        }
    }
    return one->memory;
}

/* Resizing */

static double
triangle(double distance)
{
    distance = fabs(distance);
    return distance < 1.0 ? 1.0 - distance : 0.0;
}

/* The exact weights of one pixel; returns how many there are. */
static size_t
weigh(size_t at, size_t before, double scale, double *weights, int32_t *first)
{
    double support = scale >= 1.0 ? scale : 1.0, shrink = 1.0 / support, sum = 0.0;
    double center = scale * ((double)at + 0.5);
    int64_t low = (int64_t)(center - support + 0.5);
    int64_t high = (int64_t)(center + support + 0.5);
    size_t count;
    low = low > 0 ? low : 0;
    high = high < (int64_t)before ? high : (int64_t)before;
    count = (size_t)(high - low);
    for (size_t tap = 0; tap < count; tap++) {
        weights[tap] = triangle(((double)tap + (double)low - center + 0.5) * shrink);
        sum += weights[tap];
    }
    for (size_t tap = 0; tap < count; tap++) {
        weights[tap] /= sum;
    }
    *first = (int32_t)low;
    return count;
}

/* The most bits behind the point that all weights have room for in 16 bits. */
static int
precision_for(double largest)
{
    int bits = 0;
    while (bits < 22 && (int)(0.5 + largest * (1 << (bits + 1))) < 1 << 15) {
        bits++;
    }
    return bits;
}

/* Prepare to make `after` pixels of `before`, in reverse order if mirrored. */
static int
prepare(Line *line, Kept *kept, int which, size_t before, size_t after, int mirrored)
{
    double scale = (double)before / (double)after, largest = 0.0, *exact;
    size_t most = (size_t)ceil(scale >= 1.0 ? scale : 1.0) * 2 + 1;
    line->size = after;
    line->taps = (most + TAPS - 1) / TAPS * TAPS;
    line->first = scratch(kept, which, after * sizeof *line->first);
    line->weights = scratch(kept, which + 1, after * line->taps * sizeof(int16_t));
    exact = scratch(kept, EXACT, after * line->taps * sizeof *exact);
    if (line->first == NULL || line->weights == NULL || exact == NULL) {
        return 0;
    }
    for (size_t at = 0; at < after; at++) {
        size_t to = mirrored ? after - 1 - at : at;
        double *weights = exact + to * line->taps;
        size_t count = weigh(at, before, scale, weights, &line->first[to]);
        for (size_t tap = 0; tap < line->taps; tap++) {
            weights[tap] = tap < count ? weights[tap] : 0.0;
            largest = weights[tap] > largest ? weights[tap] : largest;
        }
    }
    line->precision = precision_for(largest);
    for (size_t at = 0; at < after * line->taps; at++) {
        line->weights[at] = (int16_t)(exact[at] * (1 << line->precision) + 0.5);
    }
    return 1;
}

static unsigned char
byte_of(int32_t sum, int precision)
{
    int32_t value = sum >> precision;
    return (unsigned char)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void
across_plainly(const Line *line, const unsigned char *from, unsigned char *to)
{
    for (size_t at = 0; at < line->size; at++) {
        const int16_t *weights = line->weights + at * line->taps;
        const unsigned char *pixel = from + (size_t)line->first[at] * 3;
        int32_t sums[3];
        sums[0] = sums[1] = sums[2] = 1 << (line->precision - 1);
        for (size_t tap = 0; tap < line->taps; tap++) {
            for (size_t part = 0; part < 3; part++) {
                sums[part] += weights[tap] * pixel[tap * 3 + part];
            }
        }
        for (size_t part = 0; part < 3; part++) {
            to[at * 3 + part] = byte_of(sums[part], line->precision);
        }
    }
}

/* How many rows make row `at`: behind the last of them, there may be no memory. */
static size_t
rows_of(const Line *line, size_t at)
{
    const int16_t *weights = line->weights + at * line->taps;
    size_t count = line->taps;
    while (count > 1 && weights[count - 1] == 0) {
        count--;
    }
    return count;
}

static void
down_plainly(const Line *line, size_t at, const unsigned char *rows, size_t width,
             unsigned char *to)
{
    const int16_t *weights = line->weights + at * line->taps;
    size_t count = rows_of(line, at);
    rows += (size_t)line->first[at] * width;
    for (size_t byte = 0; byte < width; byte++) {
        int32_t sum = 1 << (line->precision - 1);
        for (size_t tap = 0; tap < count; tap++) {
            sum += weights[tap] * rows[tap * width + byte];
        }
        to[byte] = byte_of(sum, line->precision);
    }
}

#if defined(__x86_64__)

/* The red, green and blue of pixels 0 and 1, or 2 and 3, as pairs of 16 bits. */
#define PAIRS(from)                                                                    \
    from, -1, from + 3, -1, from + 1, -1, from + 4, -1, from + 2, -1, from + 5, -1,    \
        -1, -1, -1, -1

__attribute__((target("avx2"))) static inline __m256i
two_weights(const int16_t *left, const int16_t *right)
{
    int32_t one, other;
    memcpy(&one, left, sizeof one);
    memcpy(&other, right, sizeof other);
    return _mm256_set_m128i(_mm_set1_epi32(other), _mm_set1_epi32(one));
}

/* Two pixels at once, one in each half of a register, and of each four taps. */
__attribute__((target("avx2"))) static void
across_by_avx2(const Line *line, const unsigned char *from, unsigned char *to)
{
    const __m256i firsts = _mm256_setr_epi8(PAIRS(0), PAIRS(0));
    const __m256i seconds = _mm256_setr_epi8(PAIRS(6), PAIRS(6));
    const __m256i half = _mm256_set1_epi32(1 << (line->precision - 1));
    const __m128i bits = _mm_cvtsi32_si128(line->precision);
    const __m256i together = _mm256_setr_epi8(
        0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
        0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (size_t at = 0; at < line->size; at += 2) {
        size_t other = at + 1 < line->size ? at + 1 : at;
        const int16_t *left = line->weights + at * line->taps;
        const int16_t *right = line->weights + other * line->taps;
        const unsigned char *one = from + (size_t)line->first[at] * 3;
        const unsigned char *two = from + (size_t)line->first[other] * 3;
        __m256i sums = half;
        uint32_t made;
        for (size_t tap = 0; tap < line->taps; tap += TAPS) {
            __m256i pixels = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const void *)(one + tap * 3))),
                _mm_loadu_si128((const void *)(two + tap * 3)), 1);
            sums = _mm256_add_epi32(
                sums, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, firsts),
                                        two_weights(left + tap, right + tap)));
            sums = _mm256_add_epi32(
                sums, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, seconds),
                                        two_weights(left + tap + 2, right + tap + 2)));
        }
        sums = _mm256_sra_epi32(sums, bits);
        sums = _mm256_min_epi32(_mm256_max_epi32(sums, _mm256_setzero_si256()),
                                _mm256_set1_epi32(255));
        sums = _mm256_shuffle_epi8(sums, together);
        made = (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
        memcpy(to + at * 3, &made, sizeof made); /* the fourth byte is written over */
        made = (uint32_t)_mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        memcpy(to + at * 3 + 3, &made, sizeof made);
    }
}

/* Sixteen bytes at once, of two rows at a time. */
__attribute__((target("avx2"))) static void
down_by_avx2(const Line *line, size_t at, const unsigned char *rows, size_t width,
             unsigned char *to)
{
    const int16_t *weights = line->weights + at * line->taps;
    const __m256i half = _mm256_set1_epi32(1 << (line->precision - 1));
    const __m128i bits = _mm_cvtsi32_si128(line->precision);
    size_t count = rows_of(line, at), byte = 0;
    rows += (size_t)line->first[at] * width;
    for (; byte + 16 <= width; byte += 16) {
        __m256i low = half, high = half;
        __m256i packed;
        for (size_t tap = 0; tap < count; tap += 2) {
            const unsigned char *upper = rows + tap * width + byte;
            /* What stands in for a row below the last one has a weight of 0. */
            const unsigned char *lower = tap + 1 < count ? upper + width : upper;
            __m256i one = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)upper));
            __m256i two = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)lower));
            int32_t pair;
            __m256i both;
            memcpy(&pair, weights + tap, sizeof pair);
            both = _mm256_set1_epi32(pair);
            low = _mm256_add_epi32(
                low, _mm256_madd_epi16(_mm256_unpacklo_epi16(one, two), both));
            high = _mm256_add_epi32(
                high, _mm256_madd_epi16(_mm256_unpackhi_epi16(one, two), both));
        }
        packed = _mm256_packs_epi32(_mm256_sra_epi32(low, bits),
                                    _mm256_sra_epi32(high, bits));
        packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(packed, packed), 0x08);
        _mm_storeu_si128((void *)(to + byte), _mm256_castsi256_si128(packed));
    }
    for (; byte < width; byte++) {
        int32_t sum = 1 << (line->precision - 1);
        for (size_t tap = 0; tap < count; tap++) {
            sum += weights[tap] * rows[tap * width + byte];
        }
        to[byte] = byte_of(sum, line->precision);
    }
}

#endif

typedef struct {
    void (*across)(const Line *, const unsigned char *, unsigned char *);
    void (*down)(const Line *, size_t, const unsigned char *, size_t, unsigned char *);
} Resizer;

static const Resizer PLAIN = {across_plainly, down_plainly};
static Resizer resizer = {across_plainly, down_plainly};

static void
choose_resizer(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        resizer.across = across_by_avx2;
        resizer.down = down_by_avx2;
    }
#endif
}
