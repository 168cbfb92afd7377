// A team of threads that compute together, and where they wait for each other.
//
// Barriers of OpenMP spin for milliseconds. Where another process has taken the core of one thread,
// the others would keep theirs busy all that time, and the late thread could not move there. Nor do
// sleeping threads help enough: each time one wakes up, the other process may finish its time slice
// first. So a team that loses much of its time in this way goes on with fewer threads for a while,
// and so do the teams that torch starts in between.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace peagle {

constexpr int SPINS = 4000;          // before a thread sleeps: tens of microseconds
constexpr double PROMPT = 1e-4;      // seconds until a team is there, if its threads have cores
constexpr double WINDOW = 0.05;      // seconds of teams' work after which the size is judged
constexpr double MAX_LOST = 0.25;    // share of its threads' time that a team may lose by sleeping
constexpr double FIRST_RETRY = 0.5;  // seconds of work by fewer threads before all are tried again
constexpr double LONGEST_RETRY = 8.0;  // the time doubles up to this

typedef std::chrono::steady_clock Clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Barrier {
 public:
  // Return when all `threads` have called this. `judged`: all had work, so time asleep is lost.
  void wait(int threads, bool judged) {
    uint32_t now = round_.load();
    if (arrived_.fetch_add(1) + 1 == threads) {
      arrived_.store(0);
      round_.store(now + 1);
      if (asleep_.load()) wake();
      return;
    }
    Clock::time_point start = Clock::now();
    for (int i = 0; i < SPINS; ++i) {
      if (round_.load(std::memory_order_acquire) != now) return;
      relax();
    }
    asleep_.fetch_add(1);
    while (round_.load() == now) sleep(now);
    asleep_.fetch_sub(1);
    if (judged) lost_.fetch_add(int64_t(1e9 * seconds_since(start)));
  }

  // Seconds that all threads together waited until they slept, and slept.
  double lost() const { return 1e-9 * double(lost_.load()); }

 private:
  // Sleep while `round_` is `now`. May return too early.
  void sleep(uint32_t now) {
#ifdef __linux__
    syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
  }
  void wake() {
#ifdef __linux__
    syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int64_t> lost_{0};  // nanoseconds
};

// The size of the teams that one thread starts, whatever they work on.
class TeamSize {
 public:
  // The size of the next team, of at most `threads`: torch's number, if this has not changed it.
  int next(int threads) {
    if (threads != set_) threads_ = threads;
    int size = std::max(1, threads_ - left_out_);
    if (size != set_) omp_set_num_threads(size);
    set_ = size;
    return size;
  }

  // A team of `size` has worked for some seconds and waited for some.
  void learn(int size, double seconds, double lost) {
    rest_ -= seconds;
    worked_ += seconds;
    lost_ += lost / size;
    if (left_out_ && rest_ < 0) {
      left_out_ = 0;
      worked_ = lost_ = 0;
    }
    if (worked_ < WINDOW) return;
    bool loses = lost_ > MAX_LOST * worked_;
    worked_ = lost_ = 0;
    if (loses && size > 1) {
      left_out_ += std::max(1, threads_ / 4);
      rest_ = retry_;
      retry_ = std::min(2 * retry_, LONGEST_RETRY);
    } else if (!left_out_) {
      retry_ = FIRST_RETRY;
    }
  }

 private:
  int threads_ = 0, set_ = 0;     // asked for, and what OpenMP was told since
  int left_out_ = 0;              // threads
  double rest_ = 0;               // seconds of work before all threads are tried again
  double retry_ = FIRST_RETRY;    // the next such time
  double worked_ = 0, lost_ = 0;  // seconds since the size was judged
};

inline thread_local Barrier* barrier = nullptr;  // that of the team a thread is in
inline thread_local TeamSize team_size;          // of the teams it starts

// Wait for all threads of the team; see Barrier.
inline void wait_for_team(bool judged = true) {
  int threads = omp_get_num_threads();
  if (threads > 1) barrier->wait(threads, judged);
}

// Run `work` on a team of at most `threads`. None of them is late at the end of OpenMP's region.
template <typename Work>
void together(int threads, Work work) {
  int size = team_size.next(threads);
  Clock::time_point start = Clock::now();
  double late = 0;
  Barrier meeting;
#pragma omp parallel num_threads(size)
  {
    if (omp_get_thread_num() == 0) late = seconds_since(start);
    barrier = &meeting;
    work();
    wait_for_team();
  }
  if (late < PROMPT) late = 0;  // OpenMP waits for threads that have not left the last region
  team_size.learn(size, seconds_since(start), meeting.lost() + late);
}

}  // namespace peagle
