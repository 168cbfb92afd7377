// Teams whose first thread may come late to every meeting: test_team.py runs it. Arguments: the
// threads of a team, the meetings of a team, microseconds of sleep before each meeting, the number
// of teams in which only the first thread sleeps, and then of teams in which all threads do; 1
// where the meetings are judged.
// Output: the CPU time of all threads in microseconds, how often a thread met another one at
// another meeting or OpenMP's number of threads was not the team's size, and these sizes.

#include "team.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

using namespace peagle;

int main(int, char** arguments) {
  int threads = std::atoi(arguments[1]), meetings = std::atoi(arguments[2]);
  auto pause = std::chrono::microseconds(std::atoi(arguments[3]));
  int late = std::atoi(arguments[4]), all = late + std::atoi(arguments[5]);
  bool judged = std::atoi(arguments[6]);
  std::atomic<int> wrong{0};
  std::vector<int> sizes;
  omp_set_num_threads(threads);
  for (int team = 0; team < all; ++team) {
    std::vector<int> counts(threads);
    int size = 0;
    together(omp_get_max_threads(), [&] {
      int mine = omp_get_thread_num();
      if (!mine) size = omp_get_num_threads();
      wait_for_team();
      for (int i = 0; i < meetings; ++i) {
        if (pause.count() && (!mine || team >= late)) std::this_thread::sleep_for(pause);
        ++counts[mine];
        wait_for_team(judged);
        for (int other = 0; other < size; ++other) wrong += counts[other] != counts[mine];
        wait_for_team(judged);
      }
    });
    wrong += omp_get_max_threads() != size;
    sizes.push_back(size);
  }
  std::printf("%ld %d", long(1e6 * double(std::clock()) / CLOCKS_PER_SEC), wrong.load());
  for (int size : sizes) std::printf(" %d", size);
}
