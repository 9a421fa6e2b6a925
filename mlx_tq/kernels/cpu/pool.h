// Threads that share the pieces of a job, and block while there is none and none is announced.
#pragma once
#include <cstdint>

namespace tq {

// Calls work(context, piece) for each piece from 0 on, on up to `threads` threads of which the caller is one. Pieces
// are handed out one by one. A second job at the same time runs on its caller alone.
void share(int threads, int64_t pieces, void (*work)(void*, int64_t), void* context);

// Wakes the threads for a job that comes within microseconds: they wait 100 at most.
void announce();

template <class Work>
void share(int threads, int64_t pieces, Work work) {
  share(threads, pieces, [](void* context, int64_t piece) { (*static_cast<Work*>(context))(piece); }, &work);
}

}  // namespace tq
