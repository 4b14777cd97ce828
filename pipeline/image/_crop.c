/* Decodes one box of a JPEG; what is beside it is read, and what is below if asked for.

   The pixels are those that a full decode has there. The upsampler looks at the chroma
   of a pixel's neighbours, and libjpeg takes the first and last columns that it decodes
   for edges of the image, so a margin is decoded beside the box and thrown away. Rows
   need none: jpeg_skip_scanlines keeps what the next row looks at.

   Whatever is damaged or unusual is refused, and the caller decodes it in full, as if
   this module were not there. So errors have one wording, and here nothing is guessed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <stdio.h> /* jpeglib.h needs it */
#include <string.h>
#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed: earlier ones crop in other ways"
#endif

#define TEXT(value) #value
#define TEXT_OF(value) TEXT(value)
/* Of this file and of the headers that it was compiled with. Where the first number
   changes, so does which files are refused, or what is made of the others. */
#define VERSION "1, libjpeg-turbo " TEXT_OF(LIBJPEG_TURBO_VERSION)

/* In pixels: one chroma sample, which is as wide as two of them at most (is_usual). */
#define MARGIN 2

typedef struct {
    unsigned char *rows; /* uint8 [height, width, 3], C order */
    JDIMENSION top, left, height, width;
} Box;

typedef struct {
    const unsigned char *bytes;
    size_t count;
    unsigned int height, width; /* of the whole image */
    int to_end;                 /* whether to read what is below the box */
} File;

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
is_inside(const Box *box, const struct jpeg_decompress_struct *image)
{
    return box->height <= image->output_height
           && box->top <= image->output_height - box->height
           && box->width <= image->output_width
           && box->left <= image->output_width - box->width;
}

/* Let libjpeg decode the columns of the box and the margin; return where they begin. */
static JDIMENSION
crop_columns(struct jpeg_decompress_struct *image, const Box *box)
{
    JDIMENSION first = box->left > MARGIN ? box->left - MARGIN : 0;
    JDIMENSION width = box->left - first + box->width + MARGIN;
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

/* All memory is libjpeg's: an error jumps out of here, and nobody else would free it. */
static int
decode_box(struct jpeg_decompress_struct *image, const Box *box, int to_end)
{
    JSAMPROW line;
    JDIMENSION first;
    jpeg_start_decompress(image);
    if (image->out_color_components != 3 || !is_inside(box, image)) {
        return 0;
    }
    /* Not aligned: to where it is, libjpeg's SIMD stores past the cache, from which the
       copy reads. That would take an eighth longer. */
    line = (*image->mem->alloc_large)((j_common_ptr)image, JPOOL_IMAGE,
                                      (size_t)image->output_width * 3 + 1);
    line++;
    first = crop_columns(image, box);
    if (box->top > 0) {
        jpeg_skip_scanlines(image, box->top);
    }
    for (size_t row = 0; row < box->height; row++) {
        if (jpeg_read_scanlines(image, &line, 1) != 1) {
            return 0;
        }
        memcpy(box->rows + row * box->width * 3, line + (size_t)(box->left - first) * 3,
               (size_t)box->width * 3);
    }
    return to_end ? read_to_end(image, line) : ends_well(image);
}

/* What changes between setjmp and longjmp is the caller's, and keeps its value. */
static int
try_decoding(Decoder *decoder, const File *file, const Box *box)
{
    struct jpeg_decompress_struct *image = &decoder->image;
    image->err = jpeg_std_error(&decoder->manager);
    decoder->manager.error_exit = refuse;
    decoder->manager.emit_message = on_message;
    if (setjmp(decoder->refused) != 0) {
        return 0;
    }
    jpeg_create_decompress(image);
    jpeg_mem_src(image, file->bytes, (unsigned long)file->count);
    jpeg_read_header(image, TRUE);
    if (image->image_height != file->height || image->image_width != file->width
        || !is_usual(image)) {
        return 0;
    }
    image->out_color_space = JCS_RGB;
    return decode_box(image, box, file->to_end);
}

static int
decode_without_gil(const File *file, const Box *box)
{
    Decoder decoder;
    int done;
    Py_BEGIN_ALLOW_THREADS
    memset(&decoder, 0, sizeof decoder);
    done = try_decoding(&decoder, file, box);
    jpeg_destroy_decompress(&decoder.image);
    Py_END_ALLOW_THREADS
    return done;
}

static int
is_image(const Py_buffer *pixels)
{
    return pixels->ndim == 3 && pixels->itemsize == 1 && pixels->shape[2] == 3
           && pixels->shape[0] <= JPEG_MAX_DIMENSION
           && pixels->shape[1] <= JPEG_MAX_DIMENSION;
}

static PyObject *
decode_into(Py_buffer *pixels, const File *file, Box *box)
{
    if (!is_image(pixels)) {
        PyErr_SetString(PyExc_ValueError,
                        "`pixels` must be uint8 [h, w, 3], of 65500 pixels a side at most");
        return NULL;
    }
    box->rows = pixels->buf;
    box->height = (JDIMENSION)pixels->shape[0];
    box->width = (JDIMENSION)pixels->shape[1];
    return PyBool_FromLong(decode_without_gil(file, box));
}

PyDoc_STRVAR(decode_doc,
"decode(data, pixels, height, width, top, left, to_end, /)\n--\n\n"
"Decode a box of a JPEG into `pixels`; return whether that was done.\n\n"
"Args:\n"
"    data: the bytes of the file.\n"
"    pixels: uint8 [h, w, 3], C order; it holds no image after False.\n"
"    height, width: of the whole image in pixels, as its header says.\n"
"    top, left: where `pixels` lies in it.\n"
"    to_end: whether to look for damage below, too; it takes a tenth longer.\n");

static PyObject *
decode(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer data, pixels;
    PyObject *array, *done = NULL;
    File file;
    Box box;
    if (!PyArg_ParseTuple(arguments, "y*OIIIIp:decode", &data, &array, &file.height,
                          &file.width, &box.top, &box.left, &file.to_end)) {
        return NULL;
    }
    file.bytes = data.buf;
    file.count = (size_t)data.len;
    if (PyObject_GetBuffer(array, &pixels, PyBUF_CONTIG) == 0) {
        done = decode_into(&pixels, &file, &box);
        PyBuffer_Release(&pixels);
    }
    PyBuffer_Release(&data);
    return done;
}

static PyMethodDef METHODS[] = {
    {"decode", decode, METH_VARARGS, decode_doc},
    {NULL, NULL, 0, NULL},
};

static int
add_version(PyObject *module)
{
    return PyModule_AddStringConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, (void *)add_version},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* there is no state but a call's own */
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_crop",
    .m_doc = "Decodes one box of a JPEG by libjpeg-turbo, outside the GIL.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC
PyInit__crop(void)
{
    return PyModuleDef_Init(&MODULE);
}
