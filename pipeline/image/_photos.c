/* Makes a batch's photographs from the bytes of JPEGs: decode, crop, resize, mirror.

   One call does this for a chunk of photographs, outside the GIL from beginning to end.
   Of each, it decodes only the box, and each row is resized as soon as it is decoded,
   while the processor still has it in its cache.

   The pixels are those of a full decode, followed by torch's antialiased bilinear
   interpolation of uint8 (ATen/native/cpu/UpSampleKernelAVXAntialias.h): first across,
   then down, with weights of 16 bits, and a rounded byte in between.

   The upsampler of libjpeg looks at the chroma of a pixel's neighbours, and libjpeg
   takes the first and last columns that it decodes for edges of the image, so a margin
   is decoded beside the box and left out. Rows need none: jpeg_skip_scanlines keeps
   what the next row looks at.

   Whatever is damaged or unusual is refused, and the caller does it in another way, as
   if this module were not there. So errors have one wording, and nothing is guessed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h> /* jpeglib.h needs it */
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed: earlier ones crop in other ways"
#endif

#define TEXT(value) #value
#define TEXT_OF(value) TEXT(value)
/* Of this file and of the headers that it was compiled with. Where the first number
   changes, so does which files are refused, or what is made of the others. */
#define VERSION "2, libjpeg-turbo " TEXT_OF(LIBJPEG_TURBO_VERSION)

/* In pixels: one chroma sample, which is as wide as two of them at most (is_usual). */
#define MARGIN 2
/* Bytes that vector instructions may read or write behind what they work on. */
#define PAD 64
/* How many taps are worked on at once; the weights of the others are 0. */
#define TAPS 4

typedef struct {
    const unsigned char *bytes;
    size_t count;
} File;

/* What to make of a file. The box is in pixels of the image at 1/factor scale. */
typedef struct {
    int32_t height, width; /* of the whole image at full scale, as its header says */
    int32_t factor;
    int32_t top, left, tall, wide;
    int32_t mirrored;
} Crop;

typedef struct {
    unsigned char *rows; /* uint8 [tall, wide, 3], C order */
    size_t tall, wide;
} Output;

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

/* Decoding */

typedef struct {
    struct jpeg_error_mgr manager; /* first: `refuse` casts a pointer to it back */
    struct jpeg_decompress_struct image;
    jmp_buf refused;
} Decoder;

static void
refuse(j_common_ptr common)
{
    longjmp(((Decoder *)common->err)->refused, 1);
}

/* A level below 0 is a warning: pixels are made up, or stray bytes were skipped. */
static void
on_message(j_common_ptr common, int level)
{
    if (level < 0) {
        refuse(common);
    }
}

/* Whether it is one scan of 8 bits, coded by Huffman, of one component or of three, of
   which the first has 1, 2 or 4 samples where the others have one. */
static int
is_usual(struct jpeg_decompress_struct *image)
{
    const jpeg_component_info *parts = image->comp_info;
    if (jpeg_has_multiple_scans(image) || image->arith_code
        || image->data_precision != 8) {
        return 0;
    }
    if (image->num_components == 1) {
        return image->jpeg_color_space == JCS_GRAYSCALE && parts[0].h_samp_factor == 1
               && parts[0].v_samp_factor == 1;
    }
    return image->num_components == 3
           && (image->jpeg_color_space == JCS_YCbCr
               || image->jpeg_color_space == JCS_RGB)
           && parts[0].h_samp_factor <= 2 && parts[0].v_samp_factor <= 2
           && parts[1].h_samp_factor == 1 && parts[1].v_samp_factor == 1
           && parts[2].h_samp_factor == 1 && parts[2].v_samp_factor == 1;
}

static int
is_inside(const Crop *crop, const struct jpeg_decompress_struct *image)
{
    JDIMENSION tall = (JDIMENSION)crop->tall, wide = (JDIMENSION)crop->wide;
    return crop->tall > 0 && crop->wide > 0 && crop->top >= 0 && crop->left >= 0
           && tall <= image->output_height
           && (JDIMENSION)crop->top <= image->output_height - tall
           && wide <= image->output_width
           && (JDIMENSION)crop->left <= image->output_width - wide;
}

/* Let libjpeg decode the columns of the box and the margin; return where they begin. */
static JDIMENSION
crop_columns(struct jpeg_decompress_struct *image, const Crop *crop)
{
    JDIMENSION left = (JDIMENSION)crop->left;
    JDIMENSION first = left > MARGIN ? left - MARGIN : 0;
    JDIMENSION width = left - first + (JDIMENSION)crop->wide + MARGIN;
    if (width > image->output_width - first) {
        width = image->output_width - first;
    }
    jpeg_crop_scanline(image, &first, &width); /* moves `first` to an iMCU's start */
    return first;
}

static int
is_restart(int marker)
{
    return 0xD0 <= marker && marker <= 0xD7;
}

/* Whether what was not read looks like the rest of a scan: codes, restart markers, and
   then the end of the image, which a file that was cut off lacks. The decoder reads
   ahead, so it may have met the next marker. */
static int
ends_well(const struct jpeg_decompress_struct *image)
{
    const unsigned char *at = image->src->next_input_byte;
    const unsigned char *end = at + image->src->bytes_in_buffer;
    int marker = image->unread_marker;
    while (marker == 0 || is_restart(marker)) {
        at = memchr(at, 0xFF, (size_t)(end - at));
        while (at != NULL && at < end && *at == 0xFF) {
            at++;
        }
        if (at == NULL || at == end) {
            return 0;
        }
        marker = *at++; /* 0: it was no marker but a byte of codes, 255 */
    }
    return marker == JPEG_EOI;
}

/* Read codes to the end of the file, where whatever ails them is a warning: refused. */
static int
read_to_end(struct jpeg_decompress_struct *image, JSAMPROW line)
{
    /* Skipping the last row as well would skip reading. */
    JDIMENSION below = image->output_height - image->output_scanline;
    if (below > 1) {
        jpeg_skip_scanlines(image, below - 1);
    }
    if (below > 0) {
        jpeg_read_scanlines(image, &line, 1);
    }
    return jpeg_finish_decompress(image);
}

/* Read what comes before the pixels; whether it is an image that is handled here. */
static int
read_header(Decoder *decoder, const File *file)
{
    struct jpeg_decompress_struct *image = &decoder->image;
    image->err = jpeg_std_error(&decoder->manager);
    decoder->manager.error_exit = refuse;
    decoder->manager.emit_message = on_message;
    jpeg_create_decompress(image);
    jpeg_mem_src(image, file->bytes, (unsigned long)file->count);
    return jpeg_read_header(image, TRUE) == JPEG_HEADER_OK && is_usual(image);
}

/* What changes between setjmp and longjmp is the caller's, and keeps its value. */
static int
try_size(Decoder *decoder, const File *file)
{
    if (setjmp(decoder->refused) != 0) {
        return 0;
    }
    return read_header(decoder, file);
}

static int
decode_crop(Decoder *decoder, Kept *kept, const Crop *crop, const Output *output,
            int to_end)
{
    struct jpeg_decompress_struct *image = &decoder->image;
    size_t wide = output->wide * 3;
    Line columns, rows;
    JDIMENSION first;
    unsigned char *decoded, *resized;
    if (crop->factor < 1 || crop->factor > 8) {
        return 0;
    }
    image->out_color_space = JCS_RGB;
    image->scale_num = 1;
    image->scale_denom = (unsigned int)crop->factor;
    jpeg_start_decompress(image);
    if (image->out_color_components != 3 || !is_inside(crop, image)
        || !prepare(&columns, kept, FIRST_X, (size_t)crop->wide, output->wide,
                    crop->mirrored)
        || !prepare(&rows, kept, FIRST_Y, (size_t)crop->tall, output->tall, 0)) {
        return 0;
    }
    /* Not aligned: to where it is, libjpeg's SIMD stores past the cache, from which the
       next loop reads. That would take an eighth longer. */
    decoded = scratch(kept, DECODED,
                      ((size_t)image->output_width + columns.taps) * 3 + 1);
    resized = scratch(kept, ACROSS, (size_t)crop->tall * wide);
    if (decoded == NULL || resized == NULL) {
        return 0;
    }
    decoded++;
    first = crop->factor == 1 ? crop_columns(image, crop) : 0;
    if (crop->top > 0) {
        jpeg_skip_scanlines(image, (JDIMENSION)crop->top);
    }
    for (size_t row = 0; row < (size_t)crop->tall; row++) {
        if (jpeg_read_scanlines(image, &decoded, 1) != 1) {
            return 0;
        }
        resizer.across(&columns, decoded + ((size_t)crop->left - first) * 3,
                       resized + row * wide);
    }
    for (size_t row = 0; row < output->tall; row++) {
        resizer.down(&rows, row, resized, wide, output->rows + row * wide);
    }
    return to_end ? read_to_end(image, decoded) : ends_well(image);
}

static int
try_crop(Decoder *decoder, Kept *kept, const File *file, const Crop *crop,
         const Output *output, int to_end)
{
    if (setjmp(decoder->refused) != 0) {
        return 0;
    }
    return read_header(decoder, file)
           && decoder->image.image_height == (JDIMENSION)crop->height
           && decoder->image.image_width == (JDIMENSION)crop->width
           && decode_crop(decoder, kept, crop, output, to_end);
}

/* The chunk */

typedef struct {
    Py_ssize_t count;
    Py_buffer *views;
    File *files;
} Files;

static void
release_files(Files *files)
{
    for (Py_ssize_t at = 0; at < files->count; at++) {
        PyBuffer_Release(&files->views[at]);
    }
    PyMem_Free(files->views);
    PyMem_Free(files->files);
}

/* Hold the bytes of all files; -1 with an exception set if one has none. */
static int
hold_files(Files *files, PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    files->count = 0;
    files->views = PyMem_Calloc((size_t)count + 1, sizeof *files->views);
    files->files = PyMem_Calloc((size_t)count + 1, sizeof *files->files);
    if (files->views == NULL || files->files == NULL) {
        PyErr_NoMemory();
        release_files(files);
        return -1;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *one = PyList_GetItem(list, at); /* NULL if the list has shrunk */
        if (one == NULL
            || PyObject_GetBuffer(one, &files->views[at], PyBUF_SIMPLE) < 0) {
            release_files(files);
            return -1;
        }
        files->files[at].bytes = files->views[at].buf;
        files->files[at].count = (size_t)files->views[at].len;
        files->count++;
    }
    return 0;
}

/* Hold an array of this shape and type; a length of -1 may be any. */
static int
hold_array(Py_buffer *view, PyObject *array, const char *name, char kind, int ndim,
           const Py_ssize_t *shape)
{
    int fits;
    if (PyObject_GetBuffer(array, view, PyBUF_CONTIG | PyBUF_FORMAT) < 0) {
        return -1;
    }
    fits = view->ndim == ndim && view->format != NULL && view->format[0] == kind
           && view->format[1] == '\0';
    for (int at = 0; fits && at < ndim; at++) {
        fits = shape[at] < 0 ? view->shape[at] > 0 && view->shape[at] <= JPEG_MAX_DIMENSION
                             : view->shape[at] == shape[at];
    }
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "`%s` has another shape or type", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static void
find_size(const File *file, int32_t *size)
{
    Decoder decoder;
    memset(&decoder, 0, sizeof decoder);
    size[0] = size[1] = 0;
    if (try_size(&decoder, file)) {
        size[0] = (int32_t)decoder.image.image_height;
        size[1] = (int32_t)decoder.image.image_width;
    }
    jpeg_destroy_decompress(&decoder.image);
}

PyDoc_STRVAR(sizes_doc,
"sizes(files, sizes, /)\n--\n\n"
"Read the height and width of JPEGs from their headers.\n\n"
"Args:\n"
"    files: a list of bytes.\n"
"    sizes: int32 [n, 2], for height and width in pixels; 0 where a file is refused.\n");

static PyObject *
sizes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *list, *array;
    Py_buffer view;
    Files files;
    Py_ssize_t shape[2] = {0, 2};
    if (!PyArg_ParseTuple(arguments, "O!O:sizes", &PyList_Type, &list, &array)
        || hold_files(&files, list) < 0) {
        return NULL;
    }
    shape[0] = files.count;
    if (hold_array(&view, array, "sizes", 'i', 2, shape) < 0) {
        release_files(&files);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < files.count; at++) {
        find_size(&files.files[at], (int32_t *)view.buf + at * 2);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    release_files(&files);
    Py_RETURN_NONE;
}

static char
make_crop(const File *file, const Crop *crop, const Output *output, int to_end)
{
    Kept *kept = kept_by_this_thread();
    Decoder decoder;
    char made;
    if (kept == NULL) {
        return 0;
    }
    memset(&decoder, 0, sizeof decoder);
    made = (char)try_crop(&decoder, kept, file, crop, output, to_end);
    jpeg_destroy_decompress(&decoder.image);
    return made;
}

static PyObject *
make_crops(const Files *files, const Crop *crops, const Py_buffer *pixels, int to_end)
{
    Output output = {pixels->buf, (size_t)pixels->shape[1], (size_t)pixels->shape[2]};
    PyObject *made = PyBytes_FromStringAndSize(NULL, files->count);
    char *flags;
    if (made == NULL) {
        return NULL;
    }
    flags = PyBytes_AS_STRING(made);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < files->count; at++) {
        flags[at] = make_crop(&files->files[at], &crops[at], &output, to_end);
        output.rows += output.tall * output.wide * 3;
    }
    Py_END_ALLOW_THREADS
    return made;
}

PyDoc_STRVAR(crops_doc,
"crops(files, crops, pixels, to_end, /)\n--\n\n"
"Decode a box of each JPEG, resize and mirror it; return which of them were made.\n\n"
"Args:\n"
"    files: a list of bytes.\n"
"    crops: int32 [n, 8]: height and width of the whole image in pixels, as its\n"
"        header says; n of the scale 1/n to decode at; top, left, height and width of\n"
"        the box at that scale; 1 to mirror it.\n"
"    pixels: uint8 [n, h, w, 3], C order; a row holds no image if it was not made.\n"
"    to_end: whether to look for damage below a box, too; it takes a tenth longer.\n\n"
"Returns:\n"
"    bytes [n]: 1 if it was made, 0 if the file is refused.\n");

static PyObject *
crops(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *list, *array, *out, *made = NULL;
    Py_buffer boxes, pixels;
    Files files;
    int to_end;
    Py_ssize_t shape[4] = {0, 8, -1, 3};
    if (!PyArg_ParseTuple(arguments, "O!OOp:crops", &PyList_Type, &list, &array, &out,
                          &to_end)
        || hold_files(&files, list) < 0) {
        return NULL;
    }
    shape[0] = files.count;
    if (hold_array(&boxes, array, "crops", 'i', 2, shape) == 0) {
        shape[1] = -1;
        if (hold_array(&pixels, out, "pixels", 'B', 4, shape) == 0) {
            made = make_crops(&files, boxes.buf, &pixels, to_end);
            PyBuffer_Release(&pixels);
        }
        PyBuffer_Release(&boxes);
    }
    release_files(&files);
    return made;
}

static int
resize_image(const Py_buffer *image, const Py_buffer *pixels, int mirrored, int plainly)
{
    const Resizer *way = plainly ? &PLAIN : &resizer;
    size_t height = (size_t)image->shape[0], width = (size_t)image->shape[1];
    size_t tall = (size_t)pixels->shape[0], wide = (size_t)pixels->shape[1] * 3;
    Kept *kept = kept_by_this_thread();
    unsigned char *resized, *line, *made = pixels->buf;
    const unsigned char *from = image->buf;
    Line columns, rows;
    if (kept == NULL
        || !prepare(&columns, kept, FIRST_X, width, (size_t)pixels->shape[1], mirrored)
        || !prepare(&rows, kept, FIRST_Y, height, tall, 0)) {
        return 0;
    }
    line = scratch(kept, DECODED, (width + columns.taps) * 3);
    resized = scratch(kept, ACROSS, height * wide);
    if (line == NULL || resized == NULL) {
        return 0;
    }
    for (size_t row = 0; row < height; row++) {
        memcpy(line, from + row * width * 3, width * 3); /* with padding behind it */
        way->across(&columns, line, resized + row * wide);
    }
    for (size_t row = 0; row < tall; row++) {
        way->down(&rows, row, resized, wide, made + row * wide);
    }
    return 1;
}

PyDoc_STRVAR(resize_doc,
"resize(image, pixels, mirrored, plainly, /)\n--\n\n"
"Resize uint8 [H, W, 3] into uint8 [h, w, 3], bilinear and antialiased.\n\n"
"Args:\n"
"    image, pixels: from and to; C order.\n"
"    mirrored: whether to exchange left and right.\n"
"    plainly: whether to do without vector instructions.\n");

static PyObject *
resize(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *from, *to;
    Py_buffer image, pixels;
    int mirrored, plainly, made;
    Py_ssize_t shape[3] = {-1, -1, 3};
    if (!PyArg_ParseTuple(arguments, "OOpp:resize", &from, &to, &mirrored, &plainly)
        || hold_array(&image, from, "image", 'B', 3, shape) < 0) {
        return NULL;
    }
    if (hold_array(&pixels, to, "pixels", 'B', 3, shape) < 0) {
        PyBuffer_Release(&image);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    made = resize_image(&image, &pixels, mirrored, plainly);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&image);
    if (!made) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"crops", crops, METH_VARARGS, crops_doc},
    {"resize", resize, METH_VARARGS, resize_doc},
    {"sizes", sizes, METH_VARARGS, sizes_doc},
    {NULL, NULL, 0, NULL},
};

static int
set_up(PyObject *module)
{
    static int ready; /* one import at a time runs this */
    if (!ready) {
        if (pthread_key_create(&kept_key, release) != 0) {
            PyErr_SetString(PyExc_ImportError, "too many keys of threads are in use");
            return -1;
        }
        choose_resizer();
        ready = 1;
    }
    return PyModule_AddStringConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, (void *)set_up},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* there is no state but a thread's own */
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_photos",
    .m_doc = "Makes photographs of batches from JPEGs, outside the GIL.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC
PyInit__photos(void)
{
    return PyModuleDef_Init(&MODULE);
}
