// What runs inside every collective when this extension is built (see native.py).
//
// In: c10d operators as torch dispatches them, and Work.wait. Out: the same results and
// exceptions, and records in the ring that Python opened, laid out as in layout.py. It does what
// kernels.py and recorder.py do, without the interpreter: calls from C++ never touch its lock,
// and the few hundred instructions stay cheap when caches are cold. Python is asked once a
// process group and thread for its number, and on GPUs, while profiling, for events.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace {

using c10d::ProcessGroup;
using c10d::Work;

enum Kind : uint8_t { kCall = 1, kWait = 2, kDone = 3 };
enum Flag : uint8_t { kAsync = 1, kError = 2, kLate = 4 };
constexpr uint16_t kNoGroup = 0xFFFF;
constexpr int64_t kLateNs = 20'000;  // a shorter wait did not block
constexpr size_t kUnwaited = 512;

struct Record {
  uint64_t seq = 0;
  int64_t start = 0, end = 0, wait = 0, size = 0;
  uint32_t call = 0, thread = 0;
  int32_t peer = -1;
  uint32_t group_size = 0;
  uint8_t op = 0, kind = kCall, dtype = 0, flags = 0;
  uint16_t group = kNoGroup, check = 0;
};
static_assert(sizeof(Record) == 64, "layout.RECORD has 64 bytes");

struct Ring {
  Record* slots = nullptr;
  uint64_t mask = 0;
  std::atomic<uint64_t>* head = nullptr;
  std::atomic<uint64_t>* faults = nullptr;
  std::atomic<uint32_t>* control = nullptr;
  std::atomic<uint64_t> next{1};
};

struct KnownGroup {
  c10::weak_intrusive_ptr<ProcessGroup> group;  // tells when the address is another group's
  uint16_t number;
  uint32_t size;
  uint32_t without_future = 0;  // a bit for each op whose Work offers none
};

struct Noted {  // what a later wait or completion says of its call
  const void* work = nullptr;
  uint64_t seq = 0;
  uint32_t group_size = 0;
  uint16_t group = kNoGroup;
  uint8_t op = 0;
};

struct Local {
  bool busy = false;
  uint32_t thread = static_cast<uint32_t>(syscall(SYS_gettid));
  bool unwritten = false;  // `call` is to be written when its caller waited for it
  bool on_cpu = true;
  Record call;
  const void* work = nullptr;  // null: any wait, the call blocks its caller
  std::unordered_map<const void*, KnownGroup> groups;
  std::vector<Noted> unwaited;
};

std::atomic<bool> on{false};
Ring ring;
py::object* recorder = nullptr;  // never freed: threads may outlive the interpreter
PyObject* original_wait = nullptr;
std::unique_ptr<torch::Library> library;

Local& local() {
  static thread_local Local state;
  return state;
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

uint32_t clamp(int64_t ns) {
  return static_cast<uint32_t>(std::min<int64_t>(std::max<int64_t>(ns, 0), 0xFFFFFFFF));
}

uint64_t write(Record record) {
  if (!ring.slots) return 0;
  const uint64_t seq = ring.next.fetch_add(1, std::memory_order_relaxed);
  Record* slot = ring.slots + ((seq - 1) & ring.mask);
  record.seq = seq;
  __atomic_store_n(&slot->check, 0, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  constexpr size_t kBody = offsetof(Record, check);
  std::memcpy(static_cast<void*>(slot), &record, kBody);
  __atomic_store_n(&slot->check, static_cast<uint16_t>(seq % 65535 + 1), __ATOMIC_RELEASE);
  uint64_t seen = ring.head->load(std::memory_order_relaxed);
  while (seen < seq && !ring.head->compare_exchange_weak(seen, seq, std::memory_order_release)) {
  }
  return seq;
}

void fault() {
  if (ring.faults) ring.faults->fetch_add(1, std::memory_order_relaxed);
}

Noted& place(Local& state, const void* work) {
  if (state.unwaited.empty()) state.unwaited.resize(kUnwaited);
  return state.unwaited[(reinterpret_cast<uintptr_t>(work) >> 4) % kUnwaited];
}

Noted write_async(Local& state, Record record, const void* work) {
  record.flags |= kAsync;
  Noted noted{work, write(record), record.group_size, record.group, record.op};
  if (work) place(state, work) = noted;
  return noted;
}

void flush(Local& state) {
  if (!state.unwritten) return;
  state.unwritten = false;
  write_async(state, state.call, state.work);
}

void done(const Noted& noted) {
  if (!on.load(std::memory_order_relaxed)) return;
  Record record;
  record.kind = kDone;
  record.end = now();
  record.size = static_cast<int64_t>(noted.seq);
  record.op = noted.op;
  record.group = noted.group;
  record.group_size = noted.group_size;
  write(record);
}

void waited(const void* work, int64_t start, int64_t end, uint8_t flags) {
  Local& state = local();
  if (state.unwritten && (!state.work || state.work == work)) {
    state.unwritten = false;
    state.call.wait = end - start;
    state.call.end = state.on_cpu ? end : 0;
    state.call.flags = flags;
    write(state.call);
    return;
  }
  flush(state);
  Noted& noted = place(state, work);
  const bool known = noted.work == work;
  if (!known && end - start < kLateNs) return;
  Record record;
  record.kind = kWait;
  record.start = start;
  record.end = end;
  record.wait = end - start;
  record.thread = state.thread;
  record.flags = flags | (end - start < kLateNs ? kLate : 0);
  if (known) {
    record.size = static_cast<int64_t>(noted.seq);
    record.op = noted.op;
    record.group = noted.group;
    record.group_size = noted.group_size;
    noted = Noted();
  }
  write(record);
}

uint8_t code_of(c10::ScalarType type) {  // index into layout.DTYPES
  switch (type) {
    case c10::ScalarType::Byte: return 1;
    case c10::ScalarType::Char: return 2;
    case c10::ScalarType::Short: return 3;
    case c10::ScalarType::Int: return 4;
    case c10::ScalarType::Long: return 5;
    case c10::ScalarType::Float: return 6;
    case c10::ScalarType::Double: return 7;
    case c10::ScalarType::Half: return 8;
    case c10::ScalarType::BFloat16: return 9;
    case c10::ScalarType::Bool: return 10;
    case c10::ScalarType::ComplexFloat: return 11;
    case c10::ScalarType::ComplexDouble: return 12;
    case c10::ScalarType::Float8_e4m3fn: return 13;
    case c10::ScalarType::Float8_e5m2: return 14;
    default: return 0;
  }
}

// Asks Python, once a group and thread. The first call of all makes the ring there.
KnownGroup& group_of(Local& state, const c10::intrusive_ptr<ProcessGroup>& group) {
  auto found = state.groups.find(group.get());
  if (found != state.groups.end() && !found->second.group.expired()) return found->second;
  py::gil_scoped_acquire gil;
  auto [number, size] =
      recorder->attr("group")(py::cast(group)).cast<std::pair<uint16_t, uint32_t>>();
  KnownGroup known{c10::weak_intrusive_ptr<ProcessGroup>(group), number, size};
  return state.groups.insert_or_assign(group.get(), std::move(known)).first->second;
}

class Held {  // a Python object owned without holding the interpreter's lock
 public:
  explicit Held(PyObject* object = nullptr) : object_(object) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (!object_) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

struct Op {  // as ops.Op; -1 where that has None
  uint8_t code;
  int group, message, peer, blocking, returns;
  bool listed, sized, times_group;
};

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Op op) : op_(op) {}

  void operator()(
      const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(
        c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Local& state = local();
    if (state.busy || !on.load(std::memory_order_relaxed)) {
      handle.redispatchBoxed(below, stack);
      return;
    }
    Record record;
    KnownGroup* group = nullptr;
    bool blocking = false, on_cpu = true;
    try {
      const auto args = torch::jit::last(*stack, handle.schema().arguments().size());
      group = &group_of(state, args[op_.group].toCustomClass<ProcessGroup>());
      describe(args, *group, record, blocking, on_cpu);
    } catch (const std::exception&) {
      fault();
    }
    const bool measured = group && !on_cpu && ring.control && ring.control->load();
    const Held begun(measured ? begin() : nullptr);
    record.thread = state.thread;
    record.start = now();
    try {
      handle.redispatchBoxed(below, stack);
    } catch (...) {
      flush(state);
      record.end = now();
      record.call = clamp(record.end - record.start);
      record.flags = kError;
      record.size = 0;
      record.peer = -1;
      record.dtype = 0;
      write(record);
      throw;
    }
    record.call = clamp(now() - record.start);
    if (!group) return;
    try {
      finish(state, stack, record, *group, blocking, on_cpu, begun.get());
    } catch (const std::exception&) {
      fault();
    }
  }

 private:
  void describe(
      c10::ArrayRef<c10::IValue> args, const KnownGroup& group, Record& record, bool& blocking,
      bool& on_cpu) const {
    record.op = op_.code;
    record.group = group.number;
    record.group_size = group.size;
    if (op_.peer >= 0) record.peer = static_cast<int32_t>(args[op_.peer].toInt());
    blocking = op_.blocking >= 0 && !args[op_.blocking].toBool();
    const c10::IValue& message = args[op_.message];
    const at::Tensor* first;
    if (op_.listed) {
      const auto parts = message.toListRef();
      TORCH_CHECK(!parts.empty(), "no tensors");
      first = &parts[0].toTensor();
      for (const auto& part : parts) record.size += static_cast<int64_t>(part.toTensor().nbytes());
    } else {
      first = &message.toTensor();
      if (op_.sized) record.size = static_cast<int64_t>(first->nbytes());
    }
    if (op_.times_group) record.size *= group.size;
    record.dtype = op_.sized ? code_of(first->scalar_type()) : 0;
    on_cpu = first->device().is_cpu();
  }

  void finish(
      Local& state, torch::jit::Stack* stack, Record& record, KnownGroup& group, bool blocking,
      bool on_cpu, PyObject* begun) const {
    flush(state);
    if (op_.returns == 0) {
      record.end = record.start + record.call;
      write(record);
      return;
    }
    const auto work = stack->back().toCustomClass<Work>();
    if (begun) {
      follow(write_async(state, record, nullptr), work, begun);
    } else if (blocking || (op_.blocking < 0 && on_cpu)) {
      state.call = record;
      state.work = blocking ? nullptr : work.get();
      state.on_cpu = on_cpu;
      state.unwritten = true;
    } else {
      const Noted noted = write_async(state, record, on_cpu ? work.get() : nullptr);
      if (!on_cpu || (group.without_future & (1u << op_.code))) return;
      try {
        work->getFuture()->addCallback([noted](c10::ivalue::Future&) { done(noted); });
      } catch (const std::exception&) {
        group.without_future |= 1u << op_.code;
      }
    }
  }

  static PyObject* begin() {
    py::gil_scoped_acquire gil;
    try {
      return recorder->attr("begin_on_device")().release().ptr();
    } catch (const std::exception&) {
      fault();
      return nullptr;
    }
  }

  static void follow(
      const Noted& noted, const c10::intrusive_ptr<Work>& work, PyObject* begun) {
    py::gil_scoped_acquire gil;
    recorder->attr("follow_on_device")(
        py::make_tuple(noted.seq, noted.op, noted.group, noted.group_size), py::cast(work),
        py::reinterpret_borrow<py::object>(begun));
  }

  Op op_;
};

// Replaces Work.wait; torch's own method, with its own semantics, runs inside.
PyObject* timed_wait(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count < 1 || local().busy || !on.load(std::memory_order_relaxed))
    return PyObject_Vectorcall(original_wait, args, count, names);
  const void* work = nullptr;
  try {
    work = py::handle(args[0]).cast<Work*>();
  } catch (const std::exception&) {
    fault();
  }
  const int64_t start = now();
  PyObject* result = PyObject_Vectorcall(original_wait, args, count, names);
  waited(work, start, now(), result ? 0 : kError);
  return result;
}

PyMethodDef wait_method = {
    "wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(timed_wait)),
    METH_FASTCALL | METH_KEYWORDS, "Wait for the collective (timed by failslow)."};

void install(py::object owner, const std::vector<std::pair<std::string, py::tuple>>& ops) {
  recorder = new py::object(std::move(owner));
  library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const auto& [name, p] : ops) {
    const auto number = [&p = p](size_t i) { return p[i].cast<int>(); };
    Op op{static_cast<uint8_t>(number(0)), number(1), number(2), number(3), number(4), number(5),
          p[6].cast<bool>(), p[7].cast<bool>(), p[8].cast<bool>()};
    library->impl(
        name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
  }
  on = true;
}

void open_ring(py::buffer memory, uint64_t ring_at, uint64_t capacity, uint64_t head_at,
          uint64_t control_at, uint64_t faults_at) {
  // The view is never released: a late completion must find the memory mapped.
  auto* base = static_cast<char*>((new py::buffer_info(memory.request(true)))->ptr);
  ring.mask = capacity - 1;
  ring.head = reinterpret_cast<std::atomic<uint64_t>*>(base + head_at);
  ring.control = reinterpret_cast<std::atomic<uint32_t>*>(base + control_at);
  ring.faults = reinterpret_cast<std::atomic<uint64_t>*>(base + faults_at);
  ring.next = 1;
  ring.slots = reinterpret_cast<Record*>(base + ring_at);
}

uint64_t append(int64_t start, int64_t end, int64_t wait, int64_t size, int64_t call,
                uint32_t thread, int32_t peer, uint32_t group_size, uint8_t op, uint8_t kind,
                uint8_t dtype, uint8_t flags, uint16_t group) {
  Record record;
  record.start = start;
  record.end = end;
  record.wait = wait;
  record.size = size;
  record.call = clamp(call);
  record.thread = thread;
  record.peer = peer;
  record.group_size = group_size;
  record.op = op;
  record.kind = kind;
  record.dtype = dtype;
  record.flags = flags;
  record.group = group;
  return write(record);
}

}  // namespace

PYBIND11_MODULE(failslow_native, m) {
  m.def("install", &install);
  m.def("uninstall", [] { on = false; library.reset(); });
  m.def("open", &open_ring);
  m.def("stop", [] { on = false; });
  m.def("forget", [] { on = false; ring.slots = nullptr; });
  m.def("flush", [] { flush(local()); });
  m.def("fault", &fault);
  m.def("set_busy", [](bool busy) { local().busy = busy; });
  m.def("append", &append);
  m.def("timed", [](py::object original) {
    original_wait = original.inc_ref().ptr();
    auto* function = PyCFunction_New(&wait_method, nullptr);
    return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function));
  });
}
