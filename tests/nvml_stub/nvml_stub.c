/* A libnvidia-ml.so.1 without a GPU: the functions that Festina uses, with NVIDIA's own declarations.
 *
 * The GPUs live in a file that all processes map which have FESTINA_NVML_STUB set to its path, so a test, a guard
 * and a scheduler see the same ones. A test makes and changes them with the stub_ functions at the end. Every
 * call that would change a GPU is a line in FILE.log: monotonic seconds, process, GPU, what, result.
 *
 * Clock: a lock takes effect after settle_ms; the power cap and thermal_mhz hold it lower. Power:
 * idle_w + load * (busy_w - idle_w) * (clock / clock_max_mhz)^2. The energy counter is its integral, and moves
 * every counter_ms.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#define MOST_GPUS 16

/* What a test may read and set, of a GPU. */
#define GPU_FIELDS(X) \
    X(clock_min_mhz, 345) X(clock_max_mhz, 1980) X(clock_step_mhz, 15) X(default_mhz, 1980) \
    X(memory_mhz, 2619) X(memory_low_mhz, 1593) X(memory_fixed, 0) \
    X(settle_ms, 0) X(load, 0) X(idle_w, 110) X(busy_w, 690) X(cap_w, 700) X(cap_max_w, 700) X(thermal_mhz, 0) \
    X(counter_ms, 20) X(counter_offset_mj, 0) X(counter_wrap_mj, 0) X(power_scale, 1) X(temperature_c, 40) \
    X(memory_bytes, 85e9) X(used_bytes, 0) X(compute_pid, 0) X(mps_pid, 0) \
    X(persistence, 1) X(compute_mode, 0) X(mig, 0) X(capability, 90) \
    /* faults, 1 while they hold */ \
    X(not_permitted, 0) X(lost, 0) X(no_counter, 0) X(counter_stalled, 0) X(no_power, 0) X(no_clocks, 0) \
    X(ignores_locks, 0) \
    /* as the GPU is now; a lock of 0 is none */ \
    X(locked_min_mhz, 0) X(locked_max_mhz, 0) X(memory_locked_mhz, 0) X(clock_mhz, 1980) X(energy_mj, 0)

/* And of the machine. setter_uid: who may change GPUs, -1 for all. */
#define HOST_FIELDS(X) X(gpus, 0) X(no_driver, 0) X(listing_fails, 0) X(setter_uid, -1) X(cuda, 13000)

#define DECLARE(name, value) double name;
typedef struct {
    GPU_FIELDS(DECLARE)
    double now_s, next_mhz, next_s, shown_mj, shown_s;
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
} Gpu;

typedef struct {
    HOST_FIELDS(DECLARE)
    char driver[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    Gpu gpu[MOST_GPUS];
} Host;

typedef struct {
    const char *name;
    size_t offset;
    double value;
} Field;

#define GPU_ROW(name, value) {#name, offsetof(Gpu, name), value},
#define HOST_ROW(name, value) {#name, offsetof(Host, name), value},
static const Field gpu_fields[] = {GPU_FIELDS(GPU_ROW){NULL, 0, 0}};
static const Field host_fields[] = {HOST_FIELDS(HOST_ROW){NULL, 0, 0}};

static Host *host;
static int state_fd = -1, log_fd = -1, users;
static char opened[4096];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- state that processes share; the kernel lets go of a dead one's lock */

static void lock(void) {
    pthread_mutex_lock(&mutex);
    while (state_fd >= 0 && flock(state_fd, LOCK_EX) && errno == EINTR) {
    }
}

static nvmlReturn_t unlock(nvmlReturn_t result) {
    if (state_fd >= 0) flock(state_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    return result;
}

static int map_state(const char *path) {
    char log_path[4200];
    if (host && !strcmp(path, opened)) return 0;
    if (host) munmap(host, sizeof(Host)), close(state_fd), close(log_fd), host = NULL;
    snprintf(log_path, sizeof log_path, "%s.log", path);
    state_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    log_fd = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (state_fd < 0 || log_fd < 0) return -1;
    fchmod(state_fd, 0666), fchmod(log_fd, 0666); /* whoever else runs here, too */
    if (ftruncate(state_fd, sizeof(Host))) return -1;
    host = mmap(NULL, sizeof(Host), PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (host == MAP_FAILED) return host = NULL, -1;
    snprintf(opened, sizeof opened, "%s", path);
    return 0;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void note(const Gpu *gpu, nvmlReturn_t result, const char *format, ...) {
    char what[128], line[256];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    int n = snprintf(line, sizeof line, "%.6f %d %d %s %d\n", now_s(), getpid(), (int)(gpu - host->gpu), what, result);
    if (write(log_fd, line, n) != n) abort();
}

/* ---- how a GPU behaves */

static double watts_at(const Gpu *gpu, double mhz) {
    double ratio = mhz / gpu->clock_max_mhz;
    return gpu->idle_w + gpu->load * (gpu->busy_w - gpu->idle_w) * ratio * ratio;
}

static double running_mhz(const Gpu *gpu) {
    double mhz = gpu->clock_mhz;
    if (gpu->thermal_mhz > 0) mhz = fmin(mhz, gpu->thermal_mhz);
    while (mhz > gpu->clock_min_mhz && watts_at(gpu, mhz) > gpu->cap_w) mhz -= gpu->clock_step_mhz;
    return mhz;
}

static double watts(const Gpu *gpu) { return watts_at(gpu, running_mhz(gpu)); }

static void pass(Gpu *gpu) {
    double now = now_s();
    if (gpu->next_s > 0 && gpu->next_s <= now) {
        gpu->energy_mj += 1e3 * watts(gpu) * fmax(0, gpu->next_s - gpu->now_s);
        gpu->now_s = fmax(gpu->now_s, gpu->next_s), gpu->clock_mhz = gpu->next_mhz, gpu->next_s = 0;
    }
    gpu->energy_mj += 1e3 * watts(gpu) * (now - gpu->now_s);
    gpu->now_s = now;
}

static void lock_clock(Gpu *gpu, double low, double high) {
    gpu->locked_min_mhz = low, gpu->locked_max_mhz = high;
    double wanted = gpu->default_mhz;
    if (gpu->locked_max_mhz > 0 && !gpu->ignores_locks)
        wanted = fmax(gpu->locked_min_mhz, fmin(gpu->locked_max_mhz, gpu->default_mhz));
    gpu->next_mhz = wanted, gpu->next_s = gpu->now_s + gpu->settle_ms / 1e3;
    pass(gpu);
}

/* Locks the state and finds the GPU: to be followed by unlock(). */
static nvmlReturn_t take(nvmlDevice_t device, Gpu **gpu) {
    lock();
    size_t index = (size_t)device - 1;
    if (!host || !users) return NVML_ERROR_UNINITIALIZED;
    if (index >= (size_t)host->gpus) return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &host->gpu[index];
    if ((*gpu)->lost) return NVML_ERROR_GPU_IS_LOST;
    pass(*gpu);
    return NVML_SUCCESS;
}

static nvmlReturn_t may_change(const Gpu *gpu) {
    int wrong_user = host->setter_uid >= 0 && geteuid() != (uid_t)host->setter_uid;
    if (gpu->not_permitted || wrong_user) return NVML_ERROR_NO_PERMISSION;
    return gpu->no_clocks ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

/* A function that reads a GPU, and one that changes it. */
#define READS(name, arguments, body) \
    nvmlReturn_t name arguments { \
        Gpu *gpu = NULL; \
        nvmlReturn_t r = take(device, &gpu); \
        if (r == NVML_SUCCESS) body; \
        return unlock(r); \
    }
#define CHANGES(name, arguments, body, ...) \
    nvmlReturn_t name arguments { \
        Gpu *gpu = NULL; \
        nvmlReturn_t r = take(device, &gpu); \
        if (r == NVML_SUCCESS) r = may_change(gpu); \
        if (r == NVML_SUCCESS) body; \
        if (gpu) note(gpu, r, __VA_ARGS__); \
        return unlock(r); \
    }

/* ---- the machine */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    const char *path = getenv("FESTINA_NVML_STUB");
    (void)flags;
    pthread_mutex_lock(&mutex);
    int ready = path && !map_state(path) && !host->no_driver;
    users += ready;
    pthread_mutex_unlock(&mutex);
    return ready ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    int was = users;
    users -= was > 0;
    pthread_mutex_unlock(&mutex);
    return was ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
        case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
        default: return "Unknown Error";
    }
}

static nvmlReturn_t text(char *out, unsigned int length, const char *value) {
    if (strlen(value) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    lock();
    return unlock(users ? text(out, length, host->driver) : NVML_ERROR_UNINITIALIZED);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
    return nvmlSystemGetDriverVersion(out, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    lock();
    if (users) *version = host->cuda;
    return unlock(users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    lock();
    if (!users) return unlock(NVML_ERROR_UNINITIALIZED);
    if (host->listing_fails) return unlock(NVML_ERROR_UNKNOWN);
    *count = host->gpus;
    return unlock(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    Gpu *gpu;
    nvmlReturn_t r = take((nvmlDevice_t)(size_t)(index + 1), &gpu);
    if (r == NVML_SUCCESS && host->listing_fails) r = NVML_ERROR_UNKNOWN;
    if (r == NVML_SUCCESS) *device = (nvmlDevice_t)(size_t)(index + 1);
    return unlock(r);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    lock();
    if (!users) return unlock(NVML_ERROR_UNINITIALIZED);
    if (host->listing_fails) return unlock(NVML_ERROR_UNKNOWN);
    for (size_t i = 0; i < (size_t)host->gpus; i++)
        if (!strcmp(uuid, host->gpu[i].uuid)) {
            *device = (nvmlDevice_t)(i + 1);
            return unlock(host->gpu[i].lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS);
        }
    return unlock(NVML_ERROR_NOT_FOUND);
}

/* ---- what a GPU is */

READS(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index), *index = gpu - host->gpu)
READS(nvmlDeviceGetName, (nvmlDevice_t device, char *out, unsigned int length), r = text(out, length, gpu->name))
READS(nvmlDeviceGetUUID, (nvmlDevice_t device, char *out, unsigned int length), r = text(out, length, gpu->uuid))
READS(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci), {
    memset(pci, 0, sizeof *pci);
    pci->bus = 1 + (gpu - host->gpu);
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
})
READS(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor), {
    *major = gpu->capability / 10;
    *minor = (int)gpu->capability % 10;
})
READS(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), {
    memory->total = gpu->memory_bytes;
    memory->used = gpu->used_bytes;
    memory->free = memory->total - memory->used;
})
READS(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory), {
    memory->total = gpu->memory_bytes;
    memory->used = gpu->used_bytes;
    memory->free = memory->total - memory->used;
    memory->reserved = 0;
})
READS(nvmlDeviceGetPersistenceMode, (nvmlDevice_t device, nvmlEnableState_t *mode), *mode = gpu->persistence)
READS(nvmlDeviceGetComputeMode, (nvmlDevice_t device, nvmlComputeMode_t *mode), *mode = gpu->compute_mode)
READS(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned int *current, unsigned int *pending),
      *current = *pending = gpu->mig)
READS(nvmlDeviceGetTemperature, (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius), {
    (void)sensor;
    *celsius = gpu->temperature_c;
})
READS(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *rates), {
    rates->gpu = 100 * gpu->load;
    rates->memory = rates->gpu;
})

static nvmlReturn_t one_process(double pid, unsigned int *count, nvmlProcessInfo_t *infos) {
    unsigned int room = *count;
    *count = pid > 0;
    if (*count > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (*count) infos[0] = (nvmlProcessInfo_t){.pid = pid, .usedGpuMemory = 1 << 20};
    return NVML_SUCCESS;
}

READS(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos),
      r = one_process(gpu->compute_pid, count, infos))
READS(nvmlDeviceGetMPSComputeRunningProcesses_v3,
      (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos), r = one_process(gpu->mps_pid, count, infos))

/* ---- clocks */

static nvmlReturn_t list(unsigned int *count, unsigned int *out, double low, double high, double step) {
    unsigned int room = *count, n = 1 + (high - low) / step;
    *count = n;
    if (n > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++) out[i] = high - i * step;
    return NVML_SUCCESS;
}

READS(nvmlDeviceGetSupportedMemoryClocks, (nvmlDevice_t device, unsigned int *count, unsigned int *out),
      r = gpu->no_clocks ? NVML_ERROR_NOT_SUPPORTED
                         : list(count, out, gpu->memory_low_mhz, gpu->memory_mhz, gpu->memory_mhz - gpu->memory_low_mhz))
READS(nvmlDeviceGetSupportedGraphicsClocks,
      (nvmlDevice_t device, unsigned int memory, unsigned int *count, unsigned int *out), {
          int known = memory == gpu->memory_mhz || memory == gpu->memory_low_mhz;
          r = gpu->no_clocks ? NVML_ERROR_NOT_SUPPORTED
              : !known       ? NVML_ERROR_NOT_FOUND
                             : list(count, out, gpu->clock_min_mhz, gpu->clock_max_mhz, gpu->clock_step_mhz);
      })
READS(nvmlDeviceGetClockInfo, (nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz), {
    double memory = gpu->memory_locked_mhz > 0 ? gpu->memory_locked_mhz : gpu->memory_mhz;
    *mhz = type == NVML_CLOCK_MEM ? memory : running_mhz(gpu);
})
READS(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz),
      *mhz = type == NVML_CLOCK_MEM ? gpu->memory_mhz : gpu->clock_max_mhz)
READS(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, unsigned long long *reasons), {
    double mhz = running_mhz(gpu);
    *reasons = gpu->load > 0 ? 0 : nvmlClocksEventReasonGpuIdle;
    if (gpu->thermal_mhz > 0 && gpu->thermal_mhz < gpu->clock_mhz) *reasons |= nvmlClocksEventReasonSwThermalSlowdown;
    if (mhz < gpu->clock_mhz && (gpu->thermal_mhz == 0 || mhz < gpu->thermal_mhz))
        *reasons |= nvmlClocksEventReasonSwPowerCap;
})
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}
CHANGES(nvmlDeviceSetGpuLockedClocks, (nvmlDevice_t device, unsigned int low, unsigned int high), {
    if (low > high || low < gpu->clock_min_mhz || high > gpu->clock_max_mhz) r = NVML_ERROR_INVALID_ARGUMENT;
    else lock_clock(gpu, low, high);
}, "lock %u-%u", low, high)
CHANGES(nvmlDeviceResetGpuLockedClocks, (nvmlDevice_t device), {
    lock_clock(gpu, 0, 0);
}, "reset")
CHANGES(nvmlDeviceSetMemoryLockedClocks, (nvmlDevice_t device, unsigned int low, unsigned int high), {
    if (gpu->memory_fixed) r = NVML_ERROR_NOT_SUPPORTED;
    else if (high != gpu->memory_mhz && high != gpu->memory_low_mhz) r = NVML_ERROR_INVALID_ARGUMENT;
    else gpu->memory_locked_mhz = high;
}, "lock_memory %u-%u", low, high)
CHANGES(nvmlDeviceResetMemoryLockedClocks, (nvmlDevice_t device), {
    if (gpu->memory_fixed) r = NVML_ERROR_NOT_SUPPORTED;
    else gpu->memory_locked_mhz = 0;
}, "reset_memory")

/* ---- power and energy */

READS(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned int *mw), {
    if (gpu->no_power) r = NVML_ERROR_NOT_SUPPORTED;
    else *mw = 1e3 * gpu->power_scale * watts(gpu);
})
READS(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, unsigned long long *mj), {
    if (gpu->no_counter) r = NVML_ERROR_NOT_SUPPORTED;
    else {
        if (!gpu->counter_stalled && gpu->now_s - gpu->shown_s >= gpu->counter_ms / 1e3) {
            gpu->shown_mj = gpu->energy_mj;
            gpu->shown_s = gpu->now_s;
        }
        double shown = gpu->shown_mj + gpu->counter_offset_mj;
        *mj = gpu->counter_wrap_mj > 0 ? fmod(shown, gpu->counter_wrap_mj) : fmax(0, shown);
    }
})
READS(nvmlDeviceGetPowerManagementLimit, (nvmlDevice_t device, unsigned int *mw), *mw = 1e3 * gpu->cap_w)
READS(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, unsigned int *mw), *mw = 1e3 * gpu->cap_w)
READS(nvmlDeviceGetPowerManagementDefaultLimit, (nvmlDevice_t device, unsigned int *mw), *mw = 1e3 * gpu->cap_max_w)

/* ---- for tests */

/* Make a machine with so many GPUs in the file `path`; returns whether that worked. */
int stub_create(const char *path, int gpus) {
    if (gpus > MOST_GPUS || map_state(path)) return 0;
    lock();
    memset(host, 0, sizeof *host);
    for (const Field *f = host_fields; f->name; f++) *(double *)((char *)host + f->offset) = f->value;
    host->gpus = gpus;
    strcpy(host->driver, "580.95.05");
    for (int i = 0; i < gpus; i++) {
        Gpu *gpu = &host->gpu[i];
        for (const Field *f = gpu_fields; f->name; f++) *(double *)((char *)gpu + f->offset) = f->value;
        gpu->now_s = now_s();
        strcpy(gpu->name, "NVIDIA H100 80GB HBM3");
        snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-00000000-0000-0000-0000-%012d", i);
    }
    unlock(NVML_SUCCESS);
    return 1;
}

static void *field(int index, const char *name, Gpu **gpu) {
    *gpu = index < 0 ? NULL : &host->gpu[index];
    for (const Field *f = index < 0 ? host_fields : gpu_fields; f->name; f++)
        if (!strcmp(f->name, name)) return (char *)(*gpu ? (void *)*gpu : (void *)host) + f->offset;
    return NULL;
}

/* Set a field of a GPU, or with index -1 of the machine; returns whether there is such a field. */
int stub_set(const char *path, int index, const char *name, double value) {
    Gpu *gpu;
    if (map_state(path)) return 0;
    lock();
    double *at = field(index, name, &gpu);
    if (at && gpu) pass(gpu);
    if (at) *at = value;
    unlock(NVML_SUCCESS);
    return at != NULL;
}

/* Read a field; nan where there is none. clock_mhz is without cap and heat, which the last two add. */
double stub_get(const char *path, int index, const char *name) {
    Gpu *gpu;
    if (map_state(path)) return NAN;
    lock();
    double *at = field(index, name, &gpu), value = NAN;
    if (gpu) pass(gpu);
    if (at) value = *at;
    else if (gpu && !strcmp(name, "running_mhz")) value = running_mhz(gpu);
    else if (gpu && !strcmp(name, "power_w")) value = watts(gpu);
    unlock(NVML_SUCCESS);
    return value;
}

/* Set `name` or `uuid` of a GPU, or with index -1 the `driver`; returns whether there is such a text. */
int stub_set_text(const char *path, int index, const char *name, const char *value) {
    if (map_state(path)) return 0;
    lock();
    char *at = index < 0 ? (!strcmp(name, "driver") ? host->driver : NULL)
               : !strcmp(name, "name") ? host->gpu[index].name
               : !strcmp(name, "uuid") ? host->gpu[index].uuid
                                       : NULL;
    if (at) snprintf(at, 80, "%s", value);
    unlock(NVML_SUCCESS);
    return at != NULL;
}
