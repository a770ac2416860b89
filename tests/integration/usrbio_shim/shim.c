/* A stand-in for 3FS's client library, of the same C ABI, over pread and pwrite.
 *
 * It tests what our code does with that ABI - registration, lifetimes, one thread at a ring,
 * deadlines, results of every kind - and nothing of 3FS itself. Each ring has a thread that plays
 * the daemon. Rules that the real library states and does not check are checked here and counted
 * as violations.
 *
 * The folder in DUALPATH_SHIM_MOUNT plays the mount point.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_FILES 4096

struct hf3fs_iov {
  uint8_t *base;
  void *handle;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct hf3fs_ior {
  struct hf3fs_iov iov;
  void *handle;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct hf3fs_cqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void *userdata;
};

struct entry {
  int fd;
  uint8_t *memory;
  size_t offset;
  uint64_t length;
  const void *userdata;
  int64_t result;
};

struct ring {
  pthread_mutex_t lock;
  pthread_cond_t todo, done;
  pthread_t daemon;
  atomic_int users;
  bool reads, stop;
  int entries, queued, submitted, taken, finished, reaped; /* counted up for ever */
  struct entry *slots;
};

/* What a test sets and reads. */
atomic_int shim_delay_ms;      /* the daemon waits so long before each I/O */
atomic_int shim_hold;          /* while set the daemon does nothing */
atomic_int shim_fail_errno;    /* every I/O ends with this */
atomic_int shim_fail_after;    /* ... after so many good ones */
atomic_int shim_short_bytes;   /* every I/O moves so many bytes less */
atomic_int shim_no_iov;        /* hf3fs_iovcreate fails with this errno */
atomic_int shim_violations;
atomic_int shim_iovs, shim_rings, shim_files; /* alive now */
atomic_int shim_reads, shim_writes, shim_submits;

static struct {
  bool used;
  int dup;
} files[MOST_FILES];
static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;

static const char *mount(void) {
  const char *path = getenv("DUALPATH_SHIM_MOUNT");
  return path ? path : "";
}

int hf3fs_extract_mount_point(char *out, int size, const char *path) {
  size_t length = strlen(mount());
  if (!length || strncmp(path, mount(), length) || (path[length] && path[length] != '/'))
    return -1;
  if ((int)length < size)
    strcpy(out, mount());
  return (int)length + 1;
}

int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *mount_point, size_t size,
                    size_t block_size, int numa) {
  if (shim_no_iov)
    return -shim_no_iov;
  if (strcmp(mount_point, mount()))
    return -ENODEV;
  void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED)
    return -errno;
  memset(iov, 0, sizeof *iov);
  iov->base = base;
  iov->handle = base;
  iov->size = size;
  iov->block_size = block_size;
  iov->numa = numa;
  strcpy(iov->mount_point, mount_point);
  shim_iovs++;
  return 0;
}

void hf3fs_iovdestroy(struct hf3fs_iov *iov) {
  munmap(iov->base, iov->size);
  memset(iov, 0, sizeof *iov);
  shim_iovs--;
}

static void serve(struct ring *ring, struct entry *entry) {
  static atomic_int good;
  if (shim_delay_ms)
    usleep((useconds_t)shim_delay_ms * 1000);
  while (shim_hold && !ring->stop)
    usleep(1000);
  if (shim_fail_errno && (!shim_fail_after || good >= shim_fail_after)) {
    entry->result = -shim_fail_errno;
  } else {
    uint64_t length = entry->length;
    if (shim_short_bytes && (uint64_t)shim_short_bytes < length)
      length -= (uint64_t)shim_short_bytes;
    ssize_t moved = ring->reads ? pread(entry->fd, entry->memory, length, (off_t)entry->offset)
                                : pwrite(entry->fd, entry->memory, length, (off_t)entry->offset);
    entry->result = moved < 0 ? -errno : moved;
    ring->reads ? shim_reads++ : shim_writes++;
    good++;
  }
  close(entry->fd);
}

static void *daemon_main(void *argument) {
  struct ring *ring = argument;
  pthread_mutex_lock(&ring->lock);
  while (true) {
    while (ring->taken == ring->submitted && !ring->stop)
      pthread_cond_wait(&ring->todo, &ring->lock);
    if (ring->taken == ring->submitted)
      break;
    struct entry *entry = &ring->slots[ring->taken++ % ring->entries];
    pthread_mutex_unlock(&ring->lock);
    serve(ring, entry);
    pthread_mutex_lock(&ring->lock);
    ring->finished++;
    pthread_cond_broadcast(&ring->done);
  }
  pthread_mutex_unlock(&ring->lock);
  return NULL;
}

int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount_point, int entries, bool for_read,
                     int io_depth, int timeout, int numa, uint64_t flags) {
  (void)numa;
  if (strcmp(mount_point, mount()) || entries < 1 || timeout < 0)
    return -EINVAL;
  struct ring *ring = calloc(1, sizeof *ring);
  ring->slots = calloc((size_t)entries, sizeof *ring->slots);
  ring->entries = entries;
  ring->reads = for_read;
  pthread_mutex_init(&ring->lock, NULL);
  pthread_cond_init(&ring->todo, NULL);
  pthread_cond_init(&ring->done, NULL); /* CLOCK_REALTIME, as the ABI has it */
  pthread_create(&ring->daemon, NULL, daemon_main, ring);
  memset(ior, 0, sizeof *ior);
  ior->handle = ring;
  ior->for_read = for_read;
  ior->io_depth = io_depth;
  ior->timeout = timeout;
  ior->flags = flags;
  strcpy(ior->mount_point, mount_point);
  shim_rings++;
  return 0;
}

void hf3fs_iordestroy(struct hf3fs_ior *ior) {
  struct ring *ring = ior->handle;
  pthread_mutex_lock(&ring->lock);
  if (ring->reaped != ring->queued)
    shim_violations++; /* I/O was still under way */
  ring->stop = true;
  pthread_cond_broadcast(&ring->todo);
  pthread_mutex_unlock(&ring->lock);
  pthread_join(ring->daemon, NULL);
  free(ring->slots);
  free(ring);
  memset(ior, 0, sizeof *ior);
  shim_rings--;
}

int hf3fs_reg_fd(int fd, uint64_t flags) {
  (void)flags;
  int code = 0;
  pthread_mutex_lock(&files_lock);
  if (fd < 0 || fd >= MOST_FILES)
    code = EBADF;
  else if (files[fd].used)
    code = EINVAL;
  else if ((files[fd].dup = dup(fd)) < 0)
    code = errno;
  else {
    files[fd].used = true;
    shim_files++;
    code = -files[fd].dup; /* not above zero: success */
  }
  pthread_mutex_unlock(&files_lock);
  return code;
}

void hf3fs_dereg_fd(int fd) {
  pthread_mutex_lock(&files_lock);
  if (fd < 0 || fd >= MOST_FILES || !files[fd].used) {
    shim_violations++;
  } else {
    close(files[fd].dup);
    files[fd].used = false;
    shim_files--;
  }
  pthread_mutex_unlock(&files_lock);
}

int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr,
                  int fd, size_t off, uint64_t len, const void *userdata) {
  struct ring *ring = ior->handle;
  if (atomic_fetch_add(&ring->users, 1))
    shim_violations++; /* two threads prepare at once */
  int code;
  uint8_t *p = ptr;
  if (read != ring->reads || !len || p < iov->base || p + len > iov->base + iov->size)
    code = -EINVAL;
  else {
    pthread_mutex_lock(&files_lock);
    int own = fd >= 0 && fd < MOST_FILES && files[fd].used ? dup(files[fd].dup) : -1;
    pthread_mutex_unlock(&files_lock);
    pthread_mutex_lock(&ring->lock);
    if (own < 0)
      code = -EBADF;
    else if (ring->queued - ring->reaped >= ring->entries) {
      close(own);
      code = -EAGAIN;
    } else {
      code = ring->queued % ring->entries;
      ring->slots[ring->queued++ % ring->entries] =
          (struct entry){own, p, off, len, userdata, 0};
    }
    pthread_mutex_unlock(&ring->lock);
  }
  atomic_fetch_sub(&ring->users, 1);
  return code;
}

int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
  struct ring *ring = ior->handle;
  shim_submits++;
  pthread_mutex_lock(&ring->lock);
  ring->submitted = ring->queued;
  pthread_cond_signal(&ring->todo);
  pthread_mutex_unlock(&ring->lock);
  return 0;
}

int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec,
                       int min_results, const struct timespec *abs_timeout) {
  struct ring *ring = ior->handle;
  if (cqec < 1)
    return -EINVAL;
  if (min_results > cqec)
    min_results = cqec;
  int filled = 0;
  pthread_mutex_lock(&ring->lock);
  while (true) {
    while (filled < cqec && ring->reaped < ring->finished) {
      int index = ring->reaped++ % ring->entries;
      struct entry *entry = &ring->slots[index];
      cqes[filled++] = (struct hf3fs_cqe){index, 0, entry->result, entry->userdata};
    }
    if (filled >= min_results)
      break;
    int code = abs_timeout ? pthread_cond_timedwait(&ring->done, &ring->lock, abs_timeout)
                           : pthread_cond_wait(&ring->done, &ring->lock);
    if (code == ETIMEDOUT)
      break;
  }
  pthread_mutex_unlock(&ring->lock);
  return filled;
}
