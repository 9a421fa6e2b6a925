// Device buffers that check bounds and count bytes, and threadgroup memory that finds races and uninitialized reads.
#pragma once
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace tqsim {

// A load or a store, depending on which side of an assignment it stands.
template <class Space>
class Reference {
 public:
  using T = typename Space::Value;
  Reference(const Space& space, int64_t index) : space_(space), index_(index) {}
  operator T() const { return space_.load(index_); }
  T operator=(T value) const {
    space_.store(index_, value);
    return value;
  }
  T operator=(const Reference& other) const { return *this = static_cast<T>(other); }
  template <class U> T operator+=(U value) const { return *this = static_cast<T>(T(*this) + value); }
  template <class U> T operator|=(U value) const { return *this = static_cast<T>(T(*this) | value); }

 private:
  Space space_;
  int64_t index_;
};

// `device T*` or `constant T*`.
template <class T>
class Pointer {
 public:
  using Value = std::remove_const_t<T>;
  Pointer(Buffer& buffer, int number) : buffer_(&buffer), number_(number) {}
  Pointer(Buffer* buffer, int number, int64_t start) : buffer_(buffer), number_(number), start_(start) {}

  Pointer operator+(int64_t count) const { return {buffer_, number_, start_ + count}; }
  Pointer& operator+=(int64_t count) { return *this = *this + count; }
  auto operator[](int64_t index) const {
    if constexpr (std::is_const_v<T>) return load(index);
    else return Reference<Pointer>(*this, index);
  }
  auto operator*() const { return (*this)[0]; }

  Value load(int64_t index) const {
    Value value;
    const char* const from = address("load", index);
    memcpy(&value, from, sizeof value);
    buffer_->loaded += sizeof value;
    auto& fetched_by = machine->fetched_by[number_];
    if (fetched_by.empty()) fetched_by.resize(buffer_->bytes);
    uint64_t* const groups = fetched_by.data() + (from - buffer_->data);
    for (size_t byte = 0; byte < sizeof value; byte++) {
      buffer_->fetched += groups[byte] != machine->group;
      groups[byte] = machine->group;
    }
    return value;
  }
  void store(int64_t index, Value value) const {
    memcpy(address("store", index), &value, sizeof value);
    buffer_->stored += sizeof value;
  }

  // The same place as one of other values.
  template <class To>
  Pointer<To> as() const {
    const int64_t byte = start_ * static_cast<int64_t>(sizeof(T));
    if (byte % static_cast<int64_t>(sizeof(To)) != 0) fail("misaligned: a cast at byte %lld of buffer %d", static_cast<long long>(byte), number_);
    return {buffer_, number_, byte / static_cast<int64_t>(sizeof(To))};
  }

 private:
  char* address(const char* what, int64_t index) const {
    const int64_t byte = static_cast<int64_t>(buffer_->origin) + (start_ + index) * static_cast<int64_t>(sizeof(T));
    if (byte < 0 || static_cast<uint64_t>(byte) + sizeof(T) > buffer_->bytes)
      fail("out of bounds: %s at byte %lld of buffer %d, which has %llu", what, static_cast<long long>(byte), number_,
           static_cast<unsigned long long>(buffer_->bytes));
    return buffer_->data + byte;
  }

  Buffer* buffer_;
  int number_;
  int64_t start_ = 0;  // in elements
};

// `reinterpret_cast<const device To*>`.
template <class To, class T>
Pointer<To> recast(Pointer<T> pointer) {
  return pointer.template as<To>();
}

// When a thread touched an element, in barriers passed.
struct Touch {
  int32_t thread = -1;
  uint64_t group_round = 0, simd_round = 0;

  static Touch now() {
    const Thread& me = self();
    return {static_cast<int32_t>(me.index), machine->memory_round, machine->simdgroups[me.simdgroup].memory_round};
  }
  // A barrier stands between this and `later`.
  bool ended_before(const Touch& later) const {
    const bool together = thread >= 0 && uint32_t(thread) / LANES == uint32_t(later.thread) / LANES;
    return thread < 0 || group_round != later.group_round || (together && simd_round != later.simd_round);
  }
  bool races_with(const Touch& later) const { return thread != later.thread && !ended_before(later); }
};

template <class T>
struct SharedElement {
  T value;
  Touch writer, first_reader, last_reader;  // two readers: one of them is not the thread that stores next
};

// The storage behind one `threadgroup T name[N]`.
template <class T, size_t N>
struct SharedArray {
  SharedElement<T> elements[N];
  uint64_t group = 0;
  const char* name = "";

  // Each threadgroup finds its memory poisoned: nothing written, every bit set (a NaN).
  void enter(const char* declared) {
    if (group == machine->group) return;
    group = machine->group;
    name = declared;
    for (SharedElement<T>& e : elements) {
      e = SharedElement<T>();
      memset(static_cast<void*>(&e.value), 0xFF, sizeof e.value);
    }
  }
};

// `threadgroup T*`.
template <class T>
class SharedPointer {
 public:
  using Value = T;
  template <size_t N>
  SharedPointer(SharedArray<T, N>& array)
      : elements_(array.elements), size_(static_cast<int64_t>(N)), name_(array.name) {}

  SharedPointer operator+(int64_t count) const {
    SharedPointer moved = *this;
    moved.start_ += count;
    return moved;
  }
  Reference<SharedPointer> operator[](int64_t index) const { return {*this, index}; }

  T load(int64_t index) const {
    count(SHARED, VECTORS);
    Element& e = at("load", index);
    const Touch now = Touch::now();
    if (e.writer.thread < 0) fail("uninitialized: loads %s[%lld], which no thread has stored", name_, place(index));
    if (e.writer.races_with(now))
      fail("race: loads %s[%lld], which thread %d stored with no barrier between", name_, place(index), e.writer.thread);
    if (e.first_reader.ended_before(now)) e.first_reader = now;
    e.last_reader = now;
    return e.value;
  }
  void store(int64_t index, T value) const {
    count(SHARED, VECTORS);
    Element& e = at("store", index);
    const Touch now = Touch::now();
    for (const Touch& other : {e.writer, e.first_reader, e.last_reader})
      if (other.races_with(now))
        fail("race: stores %s[%lld], which thread %d used with no barrier between", name_, place(index), other.thread);
    e.writer = now;
    e.value = value;
  }

 private:
  using Element = SharedElement<T>;
  static constexpr uint64_t VECTORS = (sizeof(T) + 15) / 16;  // Metal's widest vector has 16 bytes
  long long place(int64_t index) const { return start_ + index; }
  Element& at(const char* what, int64_t index) const {
    if (place(index) < 0 || place(index) >= size_)
      fail("out of bounds: %s of %s[%lld], which has %lld elements", what, name_, place(index), static_cast<long long>(size_));
    return elements_[place(index)];
  }

  Element* elements_;
  int64_t size_;
  int64_t start_ = 0;
  const char* name_;
};

}  // namespace tqsim

// `threadgroup T name[N];` as translate.py writes it. Static: threadgroups run one after the other.
#define TQSIM_SHARED(T, name, N)                      \
  static tqsim::SharedArray<T, (N)> name##_array;     \
  name##_array.enter(#name);                          \
  tqsim::SharedPointer<T> name(name##_array)
