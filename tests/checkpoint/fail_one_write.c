/* Loaded before the C library (LD_PRELOAD): makes the n-th operation on files below a folder fail with an errno.
   Counts only what can change a disk: open for writing, write, fsync, ftruncate, posix_fallocate, mkdir, rename,
   unlink, rmdir. Whoever loads it calls arm() and reads counted(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[4096];
static int armed, number, error, count, sticky;

void arm(const char *folder, int nth, int with, int every) {
    strncpy(below, folder, sizeof below - 1);
    number = nth, error = with, count = 0, sticky = every, armed = 1;
}
int counted(void) { return count; }
void disarm(void) { armed = 0; }

static int fails(void) {
    int now = count++;
    if (now != number && !(sticky && now > number)) return 0;
    errno = error;
    return 1;
}
static int inside(int at, const char *path) {
    char whole[8192];
    if (!armed || !path) return 0;
    if (path[0] == '/') return strncmp(path, below, strlen(below)) == 0;
    char link[64], from[4096];
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, from, sizeof from - 1);
    if (length < 0) return 0;
    from[length] = 0;
    snprintf(whole, sizeof whole, "%s/%s", from, path);
    return strncmp(whole, below, strlen(below)) == 0;
}
static int held(int file) {
    char link[64], path[4096];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, below, strlen(below)) == 0;
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
#define WRITES (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

int open(const char *path, int flags, ...) { NEXT(open); MODE if (WRITES && inside(AT_FDCWD, path) && fails()) return -1; return next(path, flags, mode); }
int open64(const char *path, int flags, ...) { NEXT(open64); MODE if (WRITES && inside(AT_FDCWD, path) && fails()) return -1; return next(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { NEXT(openat); MODE if (WRITES && inside(at, path) && fails()) return -1; return next(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { NEXT(openat64); MODE if (WRITES && inside(at, path) && fails()) return -1; return next(at, path, flags, mode); }
ssize_t write(int file, const void *bytes, size_t size) { NEXT(write); if (held(file) && fails()) return -1; return next(file, bytes, size); }
ssize_t writev(int file, const struct iovec *parts, int size) { NEXT(writev); if (held(file) && fails()) return -1; return next(file, parts, size); }
int fsync(int file) { NEXT(fsync); if (held(file) && fails()) return -1; return next(file); }
int ftruncate(int file, off_t size) { NEXT(ftruncate); if (held(file) && fails()) return -1; return next(file, size); }
int ftruncate64(int file, off64_t size) { NEXT(ftruncate64); if (held(file) && fails()) return -1; return next(file, size); }
int posix_fallocate(int file, off_t from, off_t size) { NEXT(posix_fallocate); if (held(file) && fails()) return error; return next(file, from, size); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); if (inside(AT_FDCWD, path) && fails()) return -1; return next(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { NEXT(mkdirat); if (inside(at, path) && fails()) return -1; return next(at, path, mode); }
int rename(const char *from, const char *to) { NEXT(rename); if (inside(AT_FDCWD, to) && fails()) return -1; return next(from, to); }
int renameat(int a, const char *from, int b, const char *to) { NEXT(renameat); if (inside(b, to) && fails()) return -1; return next(a, from, b, to); }
int unlink(const char *path) { NEXT(unlink); if (inside(AT_FDCWD, path) && fails()) return -1; return next(path); }
int unlinkat(int at, const char *path, int flags) { NEXT(unlinkat); if (inside(at, path) && fails()) return -1; return next(at, path, flags); }
int rmdir(const char *path) { NEXT(rmdir); if (inside(AT_FDCWD, path) && fails()) return -1; return next(path); }
