// The record side of native.cpp: one thread's unwritten call, and the ring in shared memory.
//
// In: calls, waits and completions as they happen. Out: records laid out as in layout.py. The
// ring has many writing threads of one process, and one reader that takes no lock: see reader.py.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

using c10d::ProcessGroup;

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
  std::atomic<uint64_t>* counts = nullptr;  // of groups that span all workers, by number
  uint64_t counted_groups = 0;
  uint32_t world_size = 0;
  std::atomic<uint64_t> next{1};
};

struct KnownGroup {
  c10::weak_intrusive_ptr<ProcessGroup> group;  // tells when the address is another group's
  uint16_t number;
  uint32_t size;
  uint32_t without_future = 0;  // a bit for each op whose Work offers none
  std::atomic<uint64_t>* count = nullptr;  // null: does not span all workers
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
constinit std::atomic<uint64_t> nothing{0};
std::atomic<std::atomic<uint64_t>*> attention{&nothing};  // what the agent wants looked at, 0 nothing

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

}  // namespace
