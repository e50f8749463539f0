/* A libnvidia-ml.so.1 for tests: what mpsd/gpu/nvml.py asks of NVML, and faults on command.
 *   gcc -shared -fPIC -O2 -Wall -o libnvidia-ml.so.1 mocknvml.c          (-DOLD: without the calls that old drivers lack)
 * MOCK_GPUS (2)  MOCK_DIR (a folder read at every call):
 *   init       "N": nvmlInit answers N            lost.N      calls on GPU N answer 15 (GPU is lost)
 *   error      "N": nvmlDeviceGetCount answers N  anylost     look-ups by UUID answer 15, as documented when any GPU is lost
 *   gone.N     GPU N is not listed                hang.N      calls on GPU N return only when the file is gone
 *   xid        "N XID": one event, file removed   procs.N     lines "PID BYTES": compute processes, BYTES -1: unknown
 *   noevents   no GPU registers for events        mps.N       the same for MPS clients
 *   mode.N     compute mode, kept by the setter   mig.N       MIG is on
 *   eperm      setters answer 4                   unsupported optional facts answer 3 (not supported)
 *   limits.N   lines "SOFT HARD USED CGROUP": memory limits, kept by the setter; none for a cgroup: the getter answers 6
 *   limitcode  "N": memory limit calls answer N   limitunit   "N": the setter keeps multiples of N
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define MAX 64
typedef unsigned u32;
typedef unsigned long long u64;
typedef struct { int i; } Gpu;
typedef Gpu *Dev;
struct pci { char legacy[16]; u32 domain, bus, dev, id, sub; char bus_id[32]; };
struct memory2 { u32 version; u64 total, reserved, free, used; };
struct event { Dev d; u64 type, data; u32 gi, ci; };
static Gpu gpus[MAX];
static int up;

static char *path(char *b, const char *f, int n) {
  const char *d = getenv("MOCK_DIR");
  if (n < 0) snprintf(b, 600, "%s/%s", d ? d : "/nonexistent", f);
  else snprintf(b, 600, "%s/%s.%d", d ? d : "/nonexistent", f, n);
  return b; }
static int has(const char *f, int n) { char b[600]; return access(path(b, f, n), F_OK) == 0; }
static int number(const char *f, int n, int otherwise) {
  char b[600]; int r = otherwise; FILE *s = fopen(path(b, f, n), "r");
  if (s) { if (fscanf(s, "%d", &r) != 1) r = otherwise; fclose(s); }
  return r; }
static int total(void) { const char *v = getenv("MOCK_GPUS"); int n = v ? atoi(v) : 2; return n > MAX ? MAX : n; }
static Dev at(u32 index) { for (int i = 0; i < total(); i++) if (!has("gone", i) && index-- == 0) return &gpus[i]; return NULL; }
static void uuid(int i, char *o) { sprintf(o, "GPU-6d6f636b-0000-4000-8000-%012d", i); }
static int put(char *o, u32 n, const char *s) { if (strlen(s) + 1 > n) return 7; strcpy(o, s); return 0; }
#define NEED if (!up) return 1
#define DEV(d) NEED; if (!(d)) return 2; while (has("hang", (d)->i)) usleep(5000); if (has("lost", (d)->i)) return 15
#define OPTIONAL if (has("unsupported", -1)) return 3

int nvmlInit_v2(void) {
  int r = number("init", -1, 0);
  if (r) return r;
  for (int i = 0; i < MAX; i++) gpus[i].i = i;
  up++; return 0; }
int nvmlInitWithFlags(u32 f) { return nvmlInit_v2(); }
int nvmlShutdown(void) { NEED; up--; return 0; }
const char *nvmlErrorString(int r) { return "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *o, u32 n) { NEED; return put(o, n, "615.71"); }
int nvmlDeviceGetCount_v2(u32 *n) { NEED; int r = number("error", -1, 0); if (r) return r; *n = 0; while (at(*n)) ++*n; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u32 i, Dev *d) { NEED; *d = at(i); if (!*d) return 2; return has("lost", (*d)->i) ? 15 : 0; }
int nvmlDeviceGetHandleByUUID(const char *u, Dev *d) {
  NEED; if (has("anylost", -1)) return 15;
  char b[80];
  for (u32 i = 0; (*d = at(i)); i++) { uuid((*d)->i, b); if (!strcmp(b, u)) return 0; }
  return 6; }
int nvmlDeviceGetUUID(Dev d, char *o, u32 n) { DEV(d); char b[80]; uuid(d->i, b); return put(o, n, b); }
int nvmlDeviceGetName(Dev d, char *o, u32 n) { DEV(d); OPTIONAL; return put(o, n, "Mock H100 80GB"); }
int nvmlDeviceGetIndex(Dev d, u32 *i) { DEV(d); for (*i = 0; at(*i) != d; ++*i) if (!at(*i)) return 6; return 0; }
int nvmlDeviceGetCudaComputeCapability(Dev d, int *a, int *b) { DEV(d); OPTIONAL; *a = 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(Dev d, u64 *m) { DEV(d); OPTIONAL; m[0] = 81920ull << 20; m[1] = m[0]; m[2] = 0; return 0; }
int nvmlDeviceGetPciInfo_v3(Dev d, struct pci *p) {
  DEV(d); OPTIONAL; memset(p, 0, sizeof *p); p->bus = 0xa0 + d->i; sprintf(p->bus_id, "00000000:%02X:00.0", p->bus); return 0; }
int nvmlDeviceGetMigMode(Dev d, u32 *a, u32 *b) { DEV(d); OPTIONAL; *a = *b = has("mig", d->i); return 0; }
int nvmlDeviceGetComputeMode(Dev d, u32 *m) { DEV(d); *m = number("mode", d->i, 0); return 0; }
int nvmlDeviceSetComputeMode(Dev d, u32 m) {
  DEV(d); if (has("eperm", -1)) return 4;
  char b[600]; FILE *f = fopen(path(b, "mode", d->i), "w");
  if (!f) return 999;
  fprintf(f, "%u", m); fclose(f); return 0; }
struct proc2 { u32 pid; u64 mem; u32 gi, ci; };
static int processes(Dev d, u32 *n, struct proc2 *p, const char *file) {
  DEV(d); char b[600]; FILE *f = fopen(path(b, file, d->i), "r"); u32 k = 0, pid; long long m;
  while (f && fscanf(f, "%u %lld", &pid, &m) == 2) { if (k < *n && p) { p[k].pid = pid; p[k].mem = m; p[k].gi = p[k].ci = ~0u; } k++; }
  if (f) fclose(f);
  int small = k > *n; *n = k; return small ? 7 : 0; }
int nvmlDeviceGetComputeRunningProcesses_v2(Dev d, u32 *n, void *p) { return processes(d, n, p, "procs"); }
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(Dev d, struct memory2 *m) {
  DEV(d); OPTIONAL; m->total = 81920ull << 20; m->reserved = 1ull << 29; m->used = 0; m->free = m->total - m->reserved; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(Dev d, u32 *n, void *p) { return processes(d, n, p, "procs"); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Dev d, u32 *n, void *p) { return processes(d, n, p, "mps"); }
struct field { u32 id, scope; long long time, latency; u32 type, result; union { u32 ui; u64 ull; } value; };
int nvmlDeviceGetFieldValues(Dev d, int n, struct field *f) {
  DEV(d); OPTIONAL;
  for (int i = 0; i < n; i++) { f[i].result = f[i].id == 230 ? 0 : 2; f[i].value.ui = number("recovery", d->i, 0); }
  return 0; }
int nvmlDeviceGetNumaNodeId(Dev d, u32 *n) { DEV(d); OPTIONAL; *n = 1; return 0; }
struct setlimits { const char *cgroup; u64 soft, hard; };
struct getlimits { const char *cgroup; u64 soft, hard, used; };
int nvmlDeviceGetMemoryLimits_v1(Dev d, struct getlimits *l) {
  DEV(d); int r = number("limitcode", -1, 0); if (r) return r;
  char b[600], c[4096]; u64 soft, hard, used; FILE *f = fopen(path(b, "limits", d->i), "r"); r = 6;
  while (f && fscanf(f, "%llu %llu %llu %4095[^\n]", &soft, &hard, &used, c) == 4)
    if (!strcmp(c, l->cgroup)) { l->soft = soft; l->hard = hard; l->used = used; r = 0; }
  if (f) fclose(f);
  return r; }
int nvmlDeviceSetMemoryLimits_v1(Dev d, struct setlimits *l) {
  DEV(d); int r = number("limitcode", -1, 0); if (r) return r;
  if (has("eperm", -1)) return 4;
  char b[600]; u64 unit = number("limitunit", -1, 1); FILE *f = fopen(path(b, "limits", d->i), "a");
  if (!f) return 999;
  fprintf(f, "%llu %llu 0 %s\n", l->soft / unit * unit, l->hard == ~0ull ? l->hard : l->hard / unit * unit, l->cgroup);
  fclose(f); return 0; }
#endif
int nvmlEventSetCreate(void **s) { NEED; *s = malloc(1); return 0; }
int nvmlEventSetFree(void *s) { NEED; free(s); return 0; }
int nvmlDeviceRegisterEvents(Dev d, u64 t, void *s) { DEV(d); return has("noevents", -1) ? 3 : 0; }
int nvmlEventSetWait_v2(void *s, struct event *e, u32 ms) {
  char b[600];
  for (u32 t = 0;; t += 5) {
    NEED;
    FILE *f = fopen(path(b, "xid", -1), "r"); int i; u64 x;
    if (f) {
      int ok = fscanf(f, "%d %llu", &i, &x) == 2; fclose(f);
      if (ok) { unlink(b); e->d = &gpus[i]; e->type = 8; e->data = x; e->gi = e->ci = ~0u; return 0; } }
    if (t >= ms) return 10;
    usleep(5000); } }
