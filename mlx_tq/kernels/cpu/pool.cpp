#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace tq {
namespace {

// Waits a little for what another thread is about to do: to block and to wake takes 50 microseconds and more.
template <class Condition>
void spin(Condition is_met) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
  while (!is_met() && std::chrono::steady_clock::now() < end) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// One job at a time. Workers that wake up too late for a job find that it has no pieces left.
class Pool {
 public:
  void announce() {
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      announced_++;
    }
    wake_.notify_all();
  }

  void run(int threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
    if (threads < 2 || pieces < 2 || !busy_.try_lock()) {
      for (int64_t piece = 0; piece < pieces; piece++) work(context, piece);
      return;
    }
    const std::lock_guard<std::mutex> owned(busy_, std::adopt_lock);
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      while (workers_ < threads - 1) {
        std::thread(&Pool::work_forever, this, workers_).detach();
        workers_++;
      }
      work_ = work;
      context_ = context;
      pieces_ = pieces;
      next_ = 0;
      wanted_ = threads - 1;
      job_++;
    }
    wake_.notify_all();
    take_pieces(work, context, pieces);
    spin([&] { return active_ == 0; });
    std::unique_lock<std::mutex> locked(mutex_);
    wanted_ = 0;
    done_.wait(locked, [&] { return active_ == 0; });
  }

 private:
  void take_pieces(void (*work)(void*, int64_t), void* context, int64_t pieces) {
    for (int64_t piece = next_++; piece < pieces; piece = next_++) work(context, piece);
  }

  void work_forever(int number) {
    uint64_t seen = 0, heard = 0;
    std::unique_lock<std::mutex> locked(mutex_);
    for (;;) {
      const auto has_job = [&] { return job_ != seen && number < wanted_; };
      wake_.wait(locked, [&] { return has_job() || announced_ != heard; });
      heard = announced_;
      if (!has_job()) {
        const uint64_t last = job_;
        locked.unlock();
        spin([&] { return job_ != last; });
        locked.lock();
        continue;
      }
      seen = job_;
      active_++;
      auto* const work = work_;
      void* const context = context_;
      const int64_t pieces = pieces_;
      locked.unlock();
      take_pieces(work, context, pieces);
      locked.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> next_{0};
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t pieces_ = 0;
  std::atomic<uint64_t> job_{0};
  uint64_t announced_ = 0;
  int workers_ = 0, wanted_ = 0;
  std::atomic<int> active_{0};
};

Pool* pool = nullptr;

// After fork, the child does not have its parent's threads. The parent's pool, whose locks may be held, is left as it is.
void make_pool() { pool = new Pool; }

Pool& get_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
  });
  return *pool;
}

}  // namespace

void share(int threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
  get_pool().run(threads, pieces, work, context);
}

void announce() { get_pool().announce(); }

}  // namespace tq

extern "C" void tq_announce() { tq::announce(); }
