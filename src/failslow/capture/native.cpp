// What runs inside every collective when this extension is built (see native.py).
//
// In: c10d operators as torch dispatches them, and Work.wait. Out: the same results and
// exceptions, and records in the ring that Python opened, laid out as in layout.py. It does what
// kernels.py and recorder.py do, without the interpreter: calls from C++ never touch its lock,
// and the few hundred instructions stay cheap when caches are cold. Python is asked once a
// process group and thread for its number, and on GPUs, while profiling, for events.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <memory>

#include "native_ring.hpp"

namespace py = pybind11;

namespace {

using c10d::Work;

py::object* recorder = nullptr;  // never freed: threads may outlive the interpreter
PyObject* original_wait = nullptr;
std::unique_ptr<torch::Library> library;

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

// In a catch block: what a signal's handler raised while Python was asked goes on to the caller;
// what is an `Exception` is a fault of ours and stays here.
void pass_on_signals() {
  try {
    throw;
  } catch (const py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    if (!error.matches(PyExc_Exception)) throw;
  } catch (const std::exception&) {
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
  if (size == ring.world_size && number < ring.counted_groups) known.count = ring.counts + number;
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
  bool listed, sized, times_group, counted;
};

// Counts a collective that all workers are about to call; Python sees to what the agent wants,
// which may take long. What it raises is a signal's doing and goes to the caller.
void arrive(const KnownGroup& group) {
  const uint64_t count = group.count->fetch_add(1) + 1;  // before the look at the word: see pausing
  if (attention.load(std::memory_order_relaxed)->load() == 0) return;
  py::gil_scoped_acquire gil;
  recorder->attr("meet")(group.number, count);
}

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
      pass_on_signals();
      fault();
    }
    if (group && group->count && op_.counted) arrive(*group);
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
      pass_on_signals();
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
        pass_on_signals();
        group.without_future |= 1u << op_.code;
      }
    }
  }

  static PyObject* begin() {
    py::gil_scoped_acquire gil;
    try {
      return recorder->attr("begin_on_device")().release().ptr();
    } catch (const std::exception&) {
      pass_on_signals();
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
          p[6].cast<bool>(), p[7].cast<bool>(), p[8].cast<bool>(), p[9].cast<bool>()};
    library->impl(
        name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
  }
  on = true;
}

void open_ring(py::buffer memory, uint64_t ring_at, uint64_t capacity, uint64_t head_at,
          uint64_t control_at, uint64_t faults_at, uint64_t counts_at, uint64_t counted_groups,
          uint32_t world_size) {
  // The view is never released: a late completion must find the memory mapped.
  auto* base = static_cast<char*>((new py::buffer_info(memory.request(true)))->ptr);
  ring.mask = capacity - 1;
  ring.head = reinterpret_cast<std::atomic<uint64_t>*>(base + head_at);
  ring.control = reinterpret_cast<std::atomic<uint32_t>*>(base + control_at);
  ring.faults = reinterpret_cast<std::atomic<uint64_t>*>(base + faults_at);
  ring.counts = reinterpret_cast<std::atomic<uint64_t>*>(base + counts_at);
  ring.counted_groups = counted_groups;
  ring.world_size = world_size;
  ring.next = 1;
  ring.slots = reinterpret_cast<Record*>(base + ring_at);
}

void hear(py::buffer memory, uint64_t attention_at) {
  auto* base = static_cast<char*>((new py::buffer_info(memory.request(true)))->ptr);
  attention = reinterpret_cast<std::atomic<uint64_t>*>(base + attention_at);
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
  m.def("hear", &hear);
  m.def("stop", [] { on = false; });
  m.def("forget", [] { on = false; ring.slots = nullptr; attention = &nothing; });
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
