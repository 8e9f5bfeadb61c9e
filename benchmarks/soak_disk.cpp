// A disk that is full or hangs, for one folder: loaded into the server with LD_PRELOAD.
//
// SOAK_DISK_FOLDER names the folder, SOAK_DISK_CONTROL a file of at least 8 bytes that is mapped: a mode,
// and the number of calls it was applied to, 32 bits each. Mode 0 passes every call on. In mode 1 calls that
// take space (write, grow or create files) fail with ENOSPC. In mode 2 every call on the folder, reads
// included, waits until the mode changes.
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
#define REAL(name) static auto* const call = real(&::name, #name)

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

// Whether a call on `target` fails with ENOSPC. While the disk hangs, it waits first.
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

#define OPEN(name, parameters, ...)                          \
    int name parameters {                                    \
        REAL(name);                                          \
        va_list arguments;                                   \
        va_start(arguments, flags);                          \
        const mode_t mode = mode_of(flags, arguments);       \
        va_end(arguments);                                   \
        if (refuses(path, creates(path, flags))) return -1;  \
        return call(__VA_ARGS__, mode);                      \
    }
OPEN(open, (const char* path, int flags, ...), path, flags)
OPEN(open64, (const char* path, int flags, ...), path, flags)
OPEN(openat, (int at, const char* path, int flags, ...), at, path, flags)
OPEN(openat64, (int at, const char* path, int flags, ...), at, path, flags)

// `target` is the argument by which a call is known to be inside the folder.
#define CALL(result, name, parameters, target, takes_space, refusal, ...)  \
    result name parameters {                                               \
        REAL(name);                                                        \
        return refuses(target, takes_space) ? refusal : call(__VA_ARGS__); \
    }
CALL(ssize_t, write, (int fd, const void* data, size_t size), fd, true, -1, fd, data, size)
CALL(ssize_t, pwrite, (int fd, const void* data, size_t size, off_t at), fd, true, -1, fd, data, size, at)
CALL(ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), fd, true, -1, fd, data, size, at)
CALL(ssize_t, writev, (int fd, const struct iovec* parts, int count), fd, true, -1, fd, parts, count)
CALL(ssize_t, read, (int fd, void* data, size_t size), fd, false, -1, fd, data, size)
CALL(ssize_t, pread64, (int fd, void* data, size_t size, off64_t at), fd, false, -1, fd, data, size, at)
CALL(int, fsync, (int fd), fd, false, -1, fd)
CALL(int, fdatasync, (int fd), fd, false, -1, fd)
CALL(int, ftruncate64, (int fd, off64_t size), fd, false, -1, fd, size)
CALL(int, posix_fallocate64, (int fd, off64_t at, off64_t size), fd, true, ENOSPC, fd, at, size)
CALL(int, mkdir, (const char* path, mode_t mode), path, true, -1, path, mode)
CALL(int, rename, (const char* from, const char* to), to, false, -1, from, to)
CALL(int, unlink, (const char* path), path, false, -1, path)

}  // extern "C"
