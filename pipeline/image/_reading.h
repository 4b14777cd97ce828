/* Reads whole files, several at a time, outside the GIL. */

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Files that one thread has open: a process may have a thousand, of all its threads. */
#define OPEN_AT_ONCE 8

typedef struct {
    PyObject *path; /* bytes, in the encoding of the file system */
    PyObject *content; /* bytes; NULL if the file cannot be read here */
    int file; /* its descriptor; -1 when it is closed */
    off_t size;
} Reading;

/* Open a file and find its size; it stays closed if it is none, or is empty. */
static void
open_file(Reading *each)
{
    struct stat about;
    each->file = open(PyBytes_AS_STRING(each->path), O_RDONLY | O_CLOEXEC);
    if (each->file >= 0
        && (fstat(each->file, &about) < 0 || !S_ISREG(about.st_mode)
            || about.st_size <= 0)) {
        close(each->file);
        each->file = -1;
    }
    each->size = each->file < 0 ? 0 : about.st_size;
}

/* Read up to so many bytes, in one go if possible; -1: it cannot be read. */
static ssize_t
read_bytes(int file, char *to, size_t most)
{
    ssize_t count;
    do {
        count = read(file, to, most);
    } while (count < 0 && errno == EINTR);
    return count;
}

/* Read a whole file, and close it; whether it had as many bytes as it said. */
static int
read_file(Reading *each)
{
    char *to = PyBytes_AS_STRING(each->content), more;
    off_t left = each->size;
    ssize_t count = 1;
    while (left > 0 && count > 0) {
        count = read_bytes(each->file, to, (size_t)left);
        to += count;
        left -= count;
    }
    if (left == 0) {
        count = read_bytes(each->file, &more, 1);
    }
    close(each->file);
    each->file = -1;
    return left == 0 && count == 0;
}

/* Read some files at once. The GIL is taken between finding sizes and reading alone. */
static void
read_some(Reading *first, Py_ssize_t count)
{
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        open_file(&first[at]);
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        Reading *each = &first[at];
        if (each->file >= 0) {
            each->content = PyBytes_FromStringAndSize(NULL, each->size);
            if (each->content == NULL) {
                PyErr_Clear(); /* whoever reads it again says so */
                close(each->file);
                each->file = -1;
            }
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        if (first[at].file >= 0 && !read_file(&first[at])) {
            first[at].size = -1;
        }
    }
    Py_END_ALLOW_THREADS
}

/* Return the contents, and None for each file that could not be read. */
static PyObject *
contents_of(const Reading *readings, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t at = 0; list != NULL && at < count; at++) {
        const Reading *each = &readings[at];
        int whole = each->content != NULL && each->size >= 0;
        PyList_SET_ITEM(list, at, Py_NewRef(whole ? each->content : Py_None));
    }
    return list;
}

PyDoc_STRVAR(read_doc,
"read(paths, /)\n--\n\n"
"Read whole files, outside the GIL.\n\n"
"Args:\n"
"    paths: a list of paths.\n\n"
"Returns:\n"
"    list: the bytes of each; None for what is empty, is no file, or cannot be read.\n");

static PyObject *
read_files(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *list, *made = NULL;
    Py_ssize_t count, held = 0;
    Reading *readings;
    if (!PyArg_ParseTuple(arguments, "O!:read", &PyList_Type, &list)) {
        return NULL;
    }
    count = PyList_GET_SIZE(list);
    readings = PyMem_Calloc((size_t)count + 1, sizeof *readings);
    if (readings == NULL) {
        return PyErr_NoMemory();
    }
    for (; held < count; held++) {
        PyObject *path = PyList_GetItem(list, held); /* NULL if the list has shrunk */
        if (path == NULL || !PyUnicode_FSConverter(path, &readings[held].path)) {
            break;
        }
    }
    if (held == count) {
        for (Py_ssize_t at = 0; at < count; at += OPEN_AT_ONCE) {
            Py_ssize_t left = count - at;
            read_some(&readings[at], left < OPEN_AT_ONCE ? left : OPEN_AT_ONCE);
        }
        made = contents_of(readings, count);
    }
    for (Py_ssize_t at = 0; at < held; at++) {
        Py_XDECREF(readings[at].content);
        Py_DECREF(readings[at].path);
    }
    PyMem_Free(readings);
    return made;
}
