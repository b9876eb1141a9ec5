/* What g++ and its libstdc++ call of glibc that is younger than 2.28. The linker takes of it what a library needs. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>

#define FROM_GLIBC __attribute__((visibility("default")))

/* 2.32. 0: there may be several threads, so that counters are always atomic. */
char __libc_single_threaded = 0;

/* 2.33. Before it, sys/stat.h made these of functions whose first argument is the version of the structure. */
FROM_GLIBC int __xstat(int version, const char* path, struct stat* status);
FROM_GLIBC int __lxstat(int version, const char* path, struct stat* status);
FROM_GLIBC int __fxstat(int version, int file, struct stat* status);

int stat(const char* path, struct stat* status) { return __xstat(1, path, status); }
int lstat(const char* path, struct stat* status) { return __lxstat(1, path, status); }
int fstat(int file, struct stat* status) { return __fxstat(1, file, status); }
int fstat64(int file, struct stat64* status) { return __fxstat(1, file, (struct stat*)status); }

/* 2.36, of std::random_device. */
uint32_t arc4random(void) {
  uint32_t value;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}
