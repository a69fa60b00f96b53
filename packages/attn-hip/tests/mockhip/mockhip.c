// A libamdhip64 with no GPU behind it: loading looks at the code object's target, launching calls back into Python.
#include <stdint.h>
#include <string.h>

typedef int (*launch_callback)(const void* image, const char* name, unsigned blocks, unsigned threads, unsigned lds,
                               const void* argument);

enum { kMost = 4096, kName = 160 };
enum { kInvalidValue = 1, kInvalidDevice = 101, kNoBinaryForGpu = 209, kNotFound = 500 };

static launch_callback on_launch;
static const void* images[kMost];
static struct { int module; char name[kName]; } functions[kMost];
static int modules, found, device, devices = 1, load_error, launch_error, launches, loads;
static unsigned machine;  // of the one kind of device there is: the low byte of e_flags

void mock_setup(launch_callback callback, unsigned mach, int count) { on_launch = callback, machine = mach, devices = count; }
void mock_fail(int load, int launch) { load_error = load, launch_error = launch; }
int mock_launches(void) { return launches; }
int mock_loads(void) { return loads; }

int hipGetDevice(int* ordinal) { *ordinal = device; return 0; }
int hipSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= devices) return kInvalidDevice;
  device = ordinal;
  return 0;
}

int hipModuleLoadData(void** module, const void* image) {
  const unsigned char* bytes = image;
  if (load_error) return load_error;
  if (memcmp(bytes, "\177ELF", 4) != 0) return kInvalidValue;
  if (bytes[48] != machine) return kNoBinaryForGpu;
  images[modules] = image, loads++;
  *module = (void*)(intptr_t)(++modules);
  return 0;
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  // The symbol table is near enough to the name: a name that is nowhere in the file is no symbol.
  const unsigned char* bytes = images[(intptr_t)module - 1];
  uint64_t table;
  uint16_t size, count;
  memcpy(&table, bytes + 40, 8), memcpy(&size, bytes + 58, 2), memcpy(&count, bytes + 60, 2);
  const uint64_t end = table + (uint64_t)size * count, length = strlen(name) + 1;
  for (uint64_t at = 0; at + length <= end; at++)
    if (memcmp(bytes + at, name, length) == 0) {
      functions[found].module = (int)(intptr_t)module - 1;
      strncpy(functions[found].name, name, kName - 1);
      *function = (void*)(intptr_t)(++found);
      return 0;
    }
  return kNotFound;
}

int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds, void* stream, void** arguments, void** extra) {
  if (launch_error) return launch_error;
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || extra || gx == 0) return kInvalidValue;
  launches++;
  const int n = (int)(intptr_t)function - 1;
  return on_launch(images[functions[n].module], functions[n].name, gx, bx, lds, arguments[0]);
}

const char* hipGetErrorString(int code) {
  switch (code) {
    case kInvalidValue: return "invalid argument";
    case kInvalidDevice: return "invalid device ordinal";
    case kNoBinaryForGpu: return "no kernel image is available for execution on the device";
    case kNotFound: return "named symbol not found";
    case 2: return "out of memory";
    case 719: return "unspecified launch failure";
    default: return "unknown error";
  }
}
