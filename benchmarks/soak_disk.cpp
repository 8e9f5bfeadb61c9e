// A disk that is full or hangs, for one folder: loaded into the server with LD_PRELOAD.
//
// SOAK_DISK_FOLDER names the folder, SOAK_DISK_CONTROL a file of at least 8 bytes that is mapped: a mode and a
// count of calls it was applied to, both of 32 bits. Mode 0 passes everything on. In mode 1 what takes space
// (writing, growing and creating files) fails with ENOSPC. In mode 2 every call on the folder waits until the
// mode changes, reading as well.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

enum Mode : uint32_t { kPass = 0, kFull = 1, kHang = 2 };

struct Control {
    std::atomic<uint32_t> mode;
    std::atomic<uint32_t> num_calls;
};

Control nothing{};
Control* control = &nothing;
char folder[PATH_MAX];

template <typename F>
F* real(F*, const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) \
    static auto* const call = real(&::name, #name)

__attribute__((constructor)) void attach() {
    const char* path = getenv("SOAK_DISK_CONTROL");
    const char* where = getenv("SOAK_DISK_FOLDER");
    if (path == nullptr || where == nullptr) return;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void* mapped = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return;
    snprintf(folder, sizeof folder, "%s/", where);
    control = static_cast<Control*>(mapped);
}

bool is_inside(const char* path) { return strncmp(path, folder, strlen(folder)) == 0; }

bool is_inside(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return false;
    path[size] = '\0';
    return is_inside(path);
}

// Whether a call on `target` fails for want of space; waits first while the disk hangs.
template <typename Target>
bool refuses(Target target, bool takes_space) {
    const uint32_t mode = control->mode.load(std::memory_order_relaxed);
    if (mode == kPass || !is_inside(target)) return false;
    if (mode == kHang) {
        control->num_calls++;
        while (control->mode.load() == kHang) usleep(5000);
        return false;
    }
    if (!takes_space) return false;
    control->num_calls++;
    errno = ENOSPC;
    return true;
}

bool creates(const char* path, int flags) { return (flags & O_CREAT) != 0 && access(path, F_OK) != 0; }

mode_t mode_of(int flags, va_list& arguments) {
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

extern "C" {

#define OPEN(name)                                                   \
    int name(const char* path, int flags, ...) {                     \
        REAL(name);                                                  \
        va_list arguments;                                           \
        va_start(arguments, flags);                                  \
        const mode_t mode = mode_of(flags, arguments);               \
        va_end(arguments);                                           \
        if (refuses(path, creates(path, flags))) return -1;          \
        return call(path, flags, mode);                              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                 \
    int name(int at, const char* path, int flags, ...) {             \
        REAL(name);                                                  \
        va_list arguments;                                           \
        va_start(arguments, flags);                                  \
        const mode_t mode = mode_of(flags, arguments);               \
        va_end(arguments);                                           \
        if (refuses(path, creates(path, flags))) return -1;          \
        return call(at, path, flags, mode);                          \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void* data, size_t size) {
    REAL(write);
    return refuses(fd, true) ? -1 : call(fd, data, size);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
    REAL(pwrite);
    return refuses(fd, true) ? -1 : call(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
    REAL(pwrite64);
    return refuses(fd, true) ? -1 : call(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
    REAL(writev);
    return refuses(fd, true) ? -1 : call(fd, parts, count);
}
ssize_t read(int fd, void* data, size_t size) {
    REAL(read);
    return refuses(fd, false) ? -1 : call(fd, data, size);
}
ssize_t pread64(int fd, void* data, size_t size, off64_t offset) {
    REAL(pread64);
    return refuses(fd, false) ? -1 : call(fd, data, size, offset);
}
int fsync(int fd) {
    REAL(fsync);
    return refuses(fd, false) ? -1 : call(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return refuses(fd, false) ? -1 : call(fd);
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return refuses(fd, false) ? -1 : call(fd, size);
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    REAL(posix_fallocate64);
    return refuses(fd, true) ? ENOSPC : call(fd, offset, size);
}
int mkdir(const char* path, mode_t mode) {
    REAL(mkdir);
    return refuses(path, true) ? -1 : call(path, mode);
}
int rename(const char* from, const char* to) {
    REAL(rename);
    return refuses(to, false) ? -1 : call(from, to);
}
int unlink(const char* path) {
    REAL(unlink);
    return refuses(path, false) ? -1 : call(path);
}

}  // extern "C"
