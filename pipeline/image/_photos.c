/* Makes a batch's photographs of JPEGs: read, decode, crop, resize, mirror, normalise.

   Each call does its part for a chunk of photographs, outside the GIL from beginning to
   end. Of each, it decodes only the box, and each row is resized as soon as it is decoded,
   while the processor still has it in its cache.

   The pixels are those of a full decode that is resized (see _resizing.h).

   The upsampler of libjpeg looks at the chroma of a pixel's neighbours, and libjpeg
   takes the first and last columns that it decodes for edges of the image, so a margin
   is decoded beside the box and left out. Rows need none: jpeg_skip_scanlines keeps
   what the next row looks at.

   Whatever is damaged or unusual is refused, and the caller does it in another way, as
   if this module were not there. So errors have one wording, and nothing is guessed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <stdio.h> /* jpeglib.h needs it */
#include <string.h>
#include <jpeglib.h>

#include "_reading.h"
#include "_resizing.h"

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

/* Hold an array of this shape and type, which may be written to if `to_write`; a length
   of -1 may be any. */
static int
hold_array(Py_buffer *view, PyObject *array, const char *name, int to_write, char kind,
           int ndim, const Py_ssize_t *shape)
{
    int fits, how = to_write ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
    if (PyObject_GetBuffer(array, view, how | PyBUF_FORMAT) < 0) {
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
    if (hold_array(&view, array, "sizes", 1, 'i', 2, shape) < 0) {
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
    if (hold_array(&boxes, array, "crops", 0, 'i', 2, shape) == 0) {
        shape[1] = -1;
        if (hold_array(&pixels, out, "pixels", 1, 'B', 4, shape) == 0) {
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
        || hold_array(&image, from, "image", 0, 'B', 3, shape) < 0) {
        return NULL;
    }
    if (hold_array(&pixels, to, "pixels", 1, 'B', 3, shape) < 0) {
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

/* Write the value that stands in a table for each pixel and channel. Of one image, the
   values of a channel are `channel` apart, and those of a pixel `pixel`. */
#define LOOK_UP(name, kind)                                                            \
    static void name(const unsigned char *from, const kind *table, kind *to,           \
                     size_t count, size_t pixel, size_t channel)                       \
    {                                                                                  \
        for (size_t at = 0; at < count; at++) {                                        \
            to[at * pixel] = table[from[at * 3]];                                      \
            to[at * pixel + channel] = table[256 + from[at * 3 + 1]];                  \
            to[at * pixel + 2 * channel] = table[512 + from[at * 3 + 2]];              \
        }                                                                              \
    }

LOOK_UP(look_up_words, uint32_t)
LOOK_UP(look_up_halves, uint16_t)

PyDoc_STRVAR(normalize_doc,
"normalize(pixels, table, values, last, /)\n--\n\n"
"Replace each byte by the value that a table has for it.\n\n"
"Args:\n"
"    pixels: uint8 [n, p, 3], C order.\n"
"    table: int32 or int16 [3, 256], the bits of the values, by channel.\n"
"    values: the same type, [n, 3, p], or [n, p, 3] if `last`; C order.\n");

static void
normalize_images(const Py_buffer *pixels, const Py_buffer *table,
                 const Py_buffer *values, int last)
{
    size_t images = (size_t)pixels->shape[0], count = (size_t)pixels->shape[1];
    size_t pixel = last ? 3 : 1, channel = last ? 1 : count;
    const unsigned char *from = pixels->buf;
    for (size_t at = 0; at < images; at++) {
        if (table->itemsize == 4) {
            look_up_words(from + at * count * 3, table->buf,
                          (uint32_t *)values->buf + at * count * 3, count, pixel,
                          channel);
        }
        else {
            look_up_halves(from + at * count * 3, table->buf,
                           (uint16_t *)values->buf + at * count * 3, count, pixel,
                           channel);
        }
    }
}

static int
are_images(const Py_buffer *pixels, const Py_buffer *table, const Py_buffer *values)
{
    return pixels->ndim == 3 && table->ndim == 2 && values->ndim == 3
           && pixels->itemsize == 1 && pixels->shape[2] == 3 && table->shape[0] == 3
           && table->shape[1] == 256 && table->itemsize == values->itemsize
           && (table->itemsize == 4 || table->itemsize == 2)
           && values->shape[0] == pixels->shape[0]
           && values->len / values->itemsize == pixels->len;
}

static PyObject *
normalize(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *objects[3];
    Py_buffer views[3];
    int last, held = 0, fits = 0;
    if (!PyArg_ParseTuple(arguments, "OOOp:normalize", &objects[0], &objects[1],
                          &objects[2], &last)) {
        return NULL;
    }
    while (held < 3
           && PyObject_GetBuffer(objects[held], &views[held],
                                 held < 2 ? PyBUF_CONTIG_RO : PyBUF_CONTIG) == 0) {
        held++;
    }
    if (held == 3) {
        fits = are_images(&views[0], &views[1], &views[2]);
        if (fits) {
            Py_BEGIN_ALLOW_THREADS
            normalize_images(&views[0], &views[1], &views[2], last);
            Py_END_ALLOW_THREADS
        }
        else {
            PyErr_SetString(PyExc_ValueError, "an array has another shape or type");
        }
    }
    while (held > 0) {
        PyBuffer_Release(&views[--held]);
    }
    if (!fits) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"crops", crops, METH_VARARGS, crops_doc},
    {"normalize", normalize, METH_VARARGS, normalize_doc},
    {"read", read_files, METH_VARARGS, read_doc},
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
