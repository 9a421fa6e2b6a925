#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace tq {
namespace {

// One job at a time. Workers that wake up too late for a job find that it has no pieces left.
class Pool {
 public:
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
    std::unique_lock<std::mutex> locked(mutex_);
    wanted_ = 0;
    done_.wait(locked, [&] { return active_ == 0; });
  }

 private:
  void take_pieces(void (*work)(void*, int64_t), void* context, int64_t pieces) {
    for (int64_t piece = next_++; piece < pieces; piece = next_++) work(context, piece);
  }

  void work_forever(int number) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> locked(mutex_);
    for (;;) {
      wake_.wait(locked, [&] { return job_ != seen && number < wanted_; });
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
  uint64_t job_ = 0;
  int workers_ = 0, wanted_ = 0, active_ = 0;
};

Pool* pool = nullptr;

// After fork, the child does not have its parent's threads. The parent's pool, whose locks may be held, is left as it is.
void make_pool() { pool = new Pool; }

}  // namespace

void share(int threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
  static std::once_flag once;
  std::call_once(once, [] {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
  });
  pool->run(threads, pieces, work, context);
}

}  // namespace tq
